"""Renders all errors: `{"error": {"message", "type", "param", "code"}}`.

Exceptions of Django, DRF, pydantic and our own code become a `QuireError` (`as_quire_error`), and a
`QuireError` becomes a response (`error_response`), a server-sent event or a WebSocket frame.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from django.core import exceptions as django_exceptions
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpResponse
from pydantic import ValidationError
from redis.exceptions import RedisError
from rest_framework import exceptions as drf

from common.errors import AuthenticationFailed, NotFound, PermissionDenied, ServiceUnavailable
from engine.contract.errors import EngineFault, EngineUnavailable, InvalidRequest, QuireError
from engine.contract.messages import ErrorInfo
from engine.system.redis_client import is_temporary

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=QuireError)


def rename_error_param(error: E, names: Mapping[str, str]) -> E:
    """Rename the field in an error's `param` and message from ours to the client's.

    Args:
        names: ours -> theirs. `a` stands for `a.b` as well, unless that has a name of its own.
    """
    ours = error.param
    prefix = ours
    while prefix is not None and prefix not in names:
        prefix = prefix.rpartition(".")[0] or None
    if ours is not None and prefix is not None and (theirs := names[prefix]) != prefix:
        error.rename(theirs, **({prefix: theirs} if prefix != ours else {}))
    return error


#: Seconds between warnings after the first; each later one includes the number of suppressed ones.
INTERVAL_S = 10.0


class RateLimitedLog:
    """Writes warnings of one kind at a limited rate."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._written_at, self._num_suppressed = -INTERVAL_S, 0

    def warning(self, text: str, *args: object) -> None:
        """Write the warning, or only count it."""
        now = self._clock()
        if now - self._written_at < INTERVAL_S:
            self._num_suppressed += 1
            return
        if self._num_suppressed:
            text, args = f"{text} (and %d more like it before)", (*args, self._num_suppressed)
        self._written_at, self._num_suppressed = now, 0
        self._logger.warning(text, *args)


MAX_SHOWN_CHARS = 120


def describe_validation_error(error: ValidationError) -> dict[str, Any]:
    """`message`, `param` and `code` of the most helpful error."""
    errors = error.errors(include_url=False, include_context=True)
    first = _deepest_error(errors)
    param = _format_location(first["loc"])
    kind = first["type"]
    if kind == "missing":
        return {
            "message": f"Missing required parameter: '{param}'.",
            "param": param or None,
            "code": "missing_required_parameter",
        }
    text = first["msg"].removeprefix("Value error, ")
    value = "" if kind == "value_error" else f" Got {_format_value(first.get('input'))}."
    prefix = f"Invalid value for '{param}': " if param else ""
    return {
        "message": f"{prefix}{text}{'' if text.endswith('.') else '.'}{value}",
        "param": param or None,
        "code": "invalid_type" if kind.endswith("_type") else "invalid_value",
    }


def _deepest_error(errors: list[Any]) -> Any:
    """Among the errors of a union, the one that is nested deepest in the value."""
    first = errors[0]
    same_field = [item for item in errors if item["loc"][:1] == first["loc"][:1]]
    return max(
        same_field,
        key=lambda item: (
            sum(isinstance(part, int) for part in item["loc"]),
            item["type"] == "value_error",  # a union member that matched except for its content
        ),
    )


def _format_location(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`; pydantic's names of union members are left out."""
    path = ""
    for index, part in enumerate(location):
        if index and part == location[index - 1]:
            continue  # a union's tag, then the field of that name
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not part[:1].isupper() and part not in _UNION_TAGS:
            path += f".{part}" if path else part
    return path


#: Pydantic's names of simple types among a union's members.
_UNION_TAGS = frozenset({"str", "int", "float", "bool", "dict", "list", "constrained"})


def _format_value(value: Any) -> str:
    """A value for a message, limited in length."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} with {len(value)} entries"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a huge number"
    text = repr(value[:MAX_SHOWN_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN_CHARS + 2 else text[:MAX_SHOWN_CHARS] + "..."


_json = msgspec.json.Encoder()
#: In an overload there are hundreds a second, and a log line costs a sixth of a rejection.
_refusals = RateLimitedLog(logger)


class PayloadTooLarge(InvalidRequest):
    """The body exceeds the size limit."""

    status = 413
    code = "request_too_large"


class RequestTimeout(InvalidRequest):
    """The body didn't arrive in time."""

    status = 408
    code = "request_timeout"


class UnsupportedMediaType(InvalidRequest):
    """The body is not uncompressed JSON."""

    status = 415
    code = "unsupported_media_type"


class NotAcceptable(InvalidRequest):
    """`Accept` excludes all media types of this endpoint."""

    status = 406
    code = "not_acceptable"


class MethodNotAllowed(InvalidRequest):
    """The path exists, the method doesn't."""

    status = 405
    code = "method_not_allowed"


class UnsupportedField(InvalidRequest):
    """A field that Quire knows but doesn't support: rejected by name, never ignored."""

    code = "unsupported_parameter"


class Overloaded(QuireError):
    """This gateway has no capacity for more work of this kind.

    Attributes:
        retry_after: seconds until there is capacity, if known.
    """

    status = 503
    code = "overloaded"
    retry_after: float | None = None


class GatewayShuttingDown(EngineUnavailable):
    """This gateway process shuts down before the answer ends. Another one continues the stream."""

    code = "gateway_shutting_down"

    def __init__(self) -> None:
        super().__init__(
            "This gateway is shutting down. Send the request again; with the last event's id as "
            "Last-Event-ID a stream continues."
        )


class StorageUnavailable(QuireError):
    """Data can't be stored: the database is unreachable, or a disk is full. Try again later."""

    status = 503
    code = "storage_unavailable"
    retry_after = 2.0


class RequestAborted(QuireError):
    """An operator has aborted the request, in an API without a finish reason for it."""

    status = 503
    code = "request_aborted"


class Internal(QuireError):
    """A fault of ours; the log has the details under the request id."""


class RemoteError(QuireError):
    """An error that an engine replica sent."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message, param=info.param, code=info.code)
        self.status = info.status
        self.error_type = info.error_type


_DRF_KINDS: dict[type[drf.APIException], type[QuireError]] = {
    drf.NotAuthenticated: AuthenticationFailed,
    drf.AuthenticationFailed: AuthenticationFailed,
    drf.PermissionDenied: PermissionDenied,
    drf.NotFound: NotFound,
    drf.MethodNotAllowed: MethodNotAllowed,
    drf.NotAcceptable: NotAcceptable,
    drf.UnsupportedMediaType: UnsupportedMediaType,
    drf.ParseError: InvalidRequest,
    drf.ValidationError: InvalidRequest,
}


def as_quire_error(error: BaseException) -> QuireError:
    """The `QuireError` for any exception. Clients see no details of internal faults."""
    if isinstance(error, QuireError):
        return error
    if isinstance(error, ValidationError):
        return InvalidRequest(**describe_validation_error(error))
    if isinstance(error, drf.APIException):
        return _from_drf(error)
    if isinstance(error, Http404):
        return NotFound("Not found.")
    if isinstance(error, RedisError) and is_temporary(error):
        return ServiceUnavailable("Redis is unreachable. Try again later.")
    if is_about_storage(error):
        return StorageUnavailable("This can't be read or kept right now. Try again later.")
    if isinstance(error, django_exceptions.RequestDataTooBig):
        return PayloadTooLarge("The request body is too large.")
    if isinstance(error, django_exceptions.PermissionDenied):
        return PermissionDenied("This is not permitted.")
    if isinstance(error, django_exceptions.SuspiciousOperation | django_exceptions.BadRequest):
        return InvalidRequest("The request is malformed.", code="bad_request")
    return Internal("The server had an error while processing the request.")


def is_about_storage(error: BaseException) -> bool:
    """Whether an unreachable database or a full disk caused the error: it may pass."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or isinstance(error, OperationalError | InterfaceError)


def _from_drf(error: drf.APIException) -> QuireError:
    for kind, ours in _DRF_KINDS.items():
        if isinstance(error, kind):
            detail = error.detail
            named = next(iter(detail), None) if isinstance(detail, dict) else None
            return ours(_flat(detail), param=None if named == "non_field_errors" else named)
    translated = QuireError(_flat(error.detail), code=str(error.default_code))
    translated.status = error.status_code
    if isinstance(error, drf.Throttled):
        translated.error_type, translated.code = "rate_limit_error", "rate_limit_exceeded"
        translated.retry_after = error.wait  # type: ignore[attr-defined]
    return translated


def _flat(detail: Any) -> str:
    """DRF's nested details as one sentence."""
    if isinstance(detail, dict):
        return " ".join(f"{name}: {_flat(part)}" for name, part in detail.items())
    if isinstance(detail, list | tuple):
        return " ".join(map(_flat, detail))
    return str(detail)


def envelope(error: QuireError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": error.message,
            "type": error.error_type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_headers(error: QuireError) -> dict[str, str]:
    """`Retry-After` if waiting helps, `WWW-Authenticate` if a key is missing."""
    headers: dict[str, str] = {}
    wait = getattr(error, "retry_after", None)
    if wait is None and error.status in (429, 503):
        wait = 1.0
    if wait is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait)))
        headers["retry-after-ms"] = str(max(1, math.ceil(wait * 1000)))
    headers |= getattr(error, "headers", None) or {}
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="quire"'
    return headers


def encode_error(error: QuireError) -> bytes:
    """The envelope as JSON, even if the message contains a lone surrogate."""
    error.message = error.message.encode("utf-8", "replace").decode("utf-8")
    if error.param is not None:
        error.param = error.param.encode("utf-8", "replace").decode("utf-8")
    return _json.encode(envelope(error))


def report(error: BaseException, request_id: str) -> None:
    """Log what clients don't see: faults with their traceback, an engine's failure by name."""
    if isinstance(error, Overloaded):
        _refusals.warning("Request %s was refused: %s", request_id, error.message)
    elif isinstance(error, EngineFault | EngineUnavailable | RemoteError):
        if error.status >= 500:
            logger.warning("Request %s failed: %s", request_id, error.message)
    elif not isinstance(error, QuireError) and as_quire_error(error).status >= 500:
        logger.error("Request %s failed.", request_id, exc_info=error)


def error_response(error: BaseException, request_id: str = "") -> HttpResponse:
    """Render any exception as an HTTP response; log it if necessary."""
    report(error, request_id)
    reported = as_quire_error(error)
    body = encode_error(reported)
    response = HttpResponse(body, content_type="application/json", status=reported.status)
    response["Content-Length"] = str(len(body))
    for name, value in error_headers(reported).items():
        response[name] = value
    return response


def exception_handler(error: Exception, context: dict[str, Any]) -> HttpResponse:
    """DRF's hook (`REST_FRAMEWORK["EXCEPTION_HANDLER"]`): errors of any view in the envelope."""
    request = context.get("request")
    return error_response(error, getattr(request, "request_id", ""))
