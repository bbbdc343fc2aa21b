"""Errors in Anthropic's envelope: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse

from engine.contract.errors import ContextLengthExceeded, QuireError
from inference.errors import as_quire_error, error_headers, report
from inference.web.views import json_response

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_object(error: QuireError, request_id: str) -> dict[str, Any]:
    """The envelope. As at Anthropic, the message begins with the invalid field."""
    message = error.message.encode("utf-8", "replace").decode()
    if isinstance(error, ContextLengthExceeded) and error.num_tokens is not None:
        # The text by which agents recognize that they must shorten the conversation.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
    elif error.param and error.param not in message:
        message = f"{error.param}: {message}"
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = KINDS.get(error.status, default)
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id or None,
    }


def anthropic_error(error: BaseException, request_id: str = "") -> HttpResponse:
    """Render any exception as an HTTP response; log it if necessary."""
    report(error, request_id)
    quire_error = as_quire_error(error)
    response = json_response(error_object(quire_error, request_id), quire_error.status)
    for name, value in error_headers(quire_error).items():
        response[name] = value
    return response
