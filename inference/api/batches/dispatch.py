"""Runs one request of a batch through the view that serves it over HTTP, as its tenant.

It needs no socket and no key, because the caller is known. The endpoint does the parsing, limits,
rendering, generation and accounting.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse
from django.urls import Resolver404, get_resolver

from common.log_context import bound_request
from engine.contract.errors import InvalidRequest
from inference.errors import Overloaded, error_response
from inference.request.context import (
    RequestContext,
    RequestRecord,
    endpoint_of,
    log_rejected_request,
    new_id,
)
from inference.web.views import GatewayRequest, GatewayView
from tenants.authentication import Caller

URLCONF = "inference.urls"


@dataclass(frozen=True)
class DispatchResult:
    """An endpoint's response.

    Attributes:
        retry_after: seconds to wait before a retry, if the response says so.
        overloaded: whether it was rejected by a full queue, which is no fault.
    """

    status: int
    request_id: str
    body: dict[str, Any]
    retry_after: float | None = None
    overloaded: bool = False

    @property
    def error(self) -> str:
        """The error's code, or its type; "" for a success."""
        error = self.body.get("error") if self.status >= HTTPStatus.BAD_REQUEST else None
        return str(error.get("code") or error.get("type")) if isinstance(error, dict) else ""


def get_view(path: str) -> GatewayView:
    """A new view of an endpoint. Raises `InvalidRequest` for a path without a POST."""
    try:
        match = get_resolver(URLCONF).resolve(path)
    except Resolver404:
        raise InvalidRequest(f"Endpoint {path!r} not found.", param="endpoint") from None
    kind = getattr(match.func, "cls", None)
    if kind is None or not hasattr(kind, "post"):
        raise InvalidRequest(f"The endpoint {path!r} is not served.", param="endpoint")
    return cast(GatewayView, kind())


def check_endpoint(path: str) -> None:
    """Raise `InvalidRequest` unless requests can be sent there."""
    get_view(path)


async def dispatch_request(path: str, body: dict[str, Any], caller: Caller) -> DispatchResult:
    """The endpoint's response to one JSON body. Errors are responses too; nothing is raised."""
    request_id = new_id("batch_req")
    render, overloaded = error_response, False
    ctx = RequestContext(
        caller=caller,
        request_id=request_id,
        bill_partial=False,
        record=RequestRecord(endpoint_of(path)),
    )
    with bound_request(request_id=request_id, tenant=caller.tenant, model=""):
        try:
            caller.require("inference")
            caller.check_endpoint(path)
            view = get_view(path)
            render = view.render_error
            request = _request(path, body, ctx)
            response = await view.post(request)  # type: ignore[attr-defined]
        except Exception as error:
            log_rejected_request(ctx, error)
            response, overloaded = render(error, request_id), isinstance(error, Overloaded)
    retry_after_ms = response.headers.get("retry-after-ms")
    return DispatchResult(
        response.status_code,
        request_id,
        _read_answer(response),
        float(retry_after_ms) / 1000 if retry_after_ms else None,
        overloaded,
    )


def _read_answer(response: HttpResponse) -> dict[str, Any]:
    """The response's object; a text, such as subtitles, becomes its field "text"."""
    if response.headers["content-type"].startswith("text/plain"):
        return {"text": response.content.decode()}
    answer: dict[str, Any] = json.loads(response.content)
    return answer


def _request(path: str, body: dict[str, Any], ctx: RequestContext) -> GatewayRequest:
    data = json.dumps(body).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
        ],
    }
    request = cast(GatewayRequest, ASGIRequest(scope, io.BytesIO(data)))
    request.caller, request.request_id, request.ctx = ctx.caller, ctx.request_id, ctx
    return request
