"""`GatewayView`: DRF's `APIView` with a dispatch that never leaves the event loop.

DRF's (and adrf's) dispatch runs authentication, permissions and throttling synchronously, which on
an event loop means a hop into a thread and back per request. The policies here are DRF's classes,
awaited directly. `docs/gateway.md` has the measurements behind this.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import replace
from functools import lru_cache
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import msgspec
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import Resolver404, resolve
from pydantic import BaseModel
from rest_framework import exceptions
from rest_framework.exceptions import MethodNotAllowed
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.renderers import BaseRenderer
from rest_framework.views import APIView

from common.db import run_in_file_thread
from common.errors import NotFound
from common.log_context import bind_request
from inference.errors import (
    NotAcceptable,
    PayloadTooLarge,
    UnsupportedField,
    as_quire_error,
    error_response,
)
from inference.request.context import (
    ClientTimeout,
    PendingIdempotentResponse,
    RequestContext,
    RequestIds,
    RequestRecord,
    endpoint_of,
    log_rejected_request,
    sanitize_request_id,
)
from inference.schemas.objects import ErrorAnswer
from inference.web.authentication import ApiKeyAuthentication, HasScope, KeyRateThrottle
from inference.web.idempotency import IdempotencyKey, fingerprint
from inference.web.json_body import (
    LARGE_BYTES,
    check_content_encoding,
    check_content_type,
    parse_object,
)
from inference.web.responses import (
    JSON_ONLY,
)
from tenants import api_keys as scopes
from tenants.authentication import Caller

URLCONF = "inference.urls"
ROOT = "/v1"


_encode = msgspec.json.Encoder().encode
_negotiator = DefaultContentNegotiation()


@lru_cache(maxsize=256)
def _accepts(header: str, renderer_classes: tuple[type[BaseRenderer], ...]) -> bool:
    request: Any = SimpleNamespace(headers={"accept": header}, query_params={})
    try:
        _negotiator.select_renderer(request, [kind() for kind in renderer_classes])
    except exceptions.NotAcceptable:
        return False
    return True


def check_accept(header: str | None, renderer_classes: Sequence[type[BaseRenderer]]) -> None:
    """Raise `NotAcceptable` when `Accept` excludes all media types of the endpoint."""
    if header is None or header in ("*/*", "application/json"):
        return
    if not _accepts(header[:8192], tuple(renderer_classes)):
        names = ", ".join(str(kind.media_type) for kind in renderer_classes)
        raise NotAcceptable(f"Accept must allow one of {names}; got {header[:100]!r}.")


def path_not_found(path: str) -> NotFound:
    """The error for an unknown path. It suggests the same path below /v1, if that exists."""
    message = f"Unknown path: {path[:200]}."
    if path.startswith(f"{ROOT}{ROOT}/"):
        suggestion = path[len(ROOT) :]
    elif path.startswith(f"{ROOT}/"):
        suggestion = path.rstrip("/")
    else:
        suggestion = ROOT + path
    if _route_exists(suggestion):
        message += f" Did you mean {suggestion[:200]}?"
    elif not path.startswith(f"{ROOT}/"):
        message += " The API is below /v1, and /openapi.json lists all of it."
    return NotFound(message, code="unknown_url")


def _route_exists(path: str) -> bool:
    """Whether an endpoint other than `NotFoundView` has this path."""
    try:
        view: Any = resolve(path, URLCONF).func
    except Resolver404:
        return False
    return not getattr(view.cls, "is_not_found_view", False)


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Check = Callable[[], Awaitable[None]]

#: Paths whose POST carries a file or a part of one, with a larger limit for authenticated callers.
UPLOADS = re.compile(
    r"/v1/files|/v1/uploads/[^/]+/parts|/v1/messages/batches|/v1/audio/(transcriptions|translations)"
)
#: Scope key of the file with such a body, for views that read it themselves.
BODY = "quire.body"


class ClientDisconnected(Exception):
    """The client closed the connection before its request was complete."""


#: Scope keys of what the access log needs from views.
HANDLER, RECEIVED = "quire.handler", "quire.received"
#: Scope key of when (`time.perf_counter`) a request was complete, before it was queued.
ARRIVED = "quire.arrived"
TENANT, KEY, ERROR = "quire.tenant", "quire.key", "quire.error"
#: Scope key of the id of a request that was rejected before it reached a view.
REQUEST_ID = "quire.request_id"


#: Number of calls that a report, a search or a list counts as.
LIST_COST = 10

Handler = Callable[..., Awaitable[HttpResponseBase]]


class GatewayRequest(HttpRequest):
    """Django's request with `GatewayView`'s attributes; for type checkers only."""

    request_id: str
    received: float
    caller: Caller
    ctx: RequestContext
    #: A large body that was parsed in a thread.
    parsed: dict[str, Any]
    scope: MutableMapping[str, Any]


class GatewayView(APIView):
    """Base of the API's endpoints: every error has OpenAI's envelope.

    Attributes:
        required_scope: scope that the key needs; "" for none.
        public: whether no key is needed.
        generates: whether its POST runs a model and counts when it is admitted (`metering.admit`).
            Any other request counts as `call_cost` of the key's calls per minute.
        queues_for_model: whether its requests wait for a model, and are rejected when too many do.
        supports_load_shedding: whether `inference.edge.load_shedding` can read the model and the
            priority from its body.
        streams_request_body: whether it reads the body from the file at `BODY` in the scope.
    """

    authentication_classes = (ApiKeyAuthentication,)
    permission_classes = (HasScope,)
    throttle_classes = (KeyRateThrottle,)
    renderer_classes: Sequence[type[BaseRenderer]] = JSON_ONLY
    # Django would derive it from the handlers, and a view may have none.
    view_is_async = True
    required_scope: ClassVar[str] = "inference"
    public: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    call_cost: ClassVar[int] = 1
    queues_for_model: ClassVar[bool] = False
    supports_load_shedding: ClassVar[bool] = False
    streams_request_body: ClassVar[bool] = False
    #: Renders any exception as a response in OpenAI's envelope.
    render_error = staticmethod(error_response)
    #: Its schema.
    error_schema: ClassVar[type[BaseModel]] = ErrorAnswer

    async def dispatch(  # type: ignore[override]
        self, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        """Negotiate, authenticate, permit, handle; turn any exception into a response."""
        gateway_request = cast(GatewayRequest, request)
        scope = getattr(request, "scope", None) or {}
        gateway_request.received = scope.get(ARRIVED) or time.perf_counter()
        gateway_request.request_id = sanitize_request_id(request.META.get("HTTP_X_REQUEST_ID"))
        bind_request(request_id=gateway_request.request_id)
        response: HttpResponseBase
        try:
            meta = request.META
            timeout = ClientTimeout.from_headers(
                meta.get("HTTP_X_REQUEST_TIMEOUT"), meta.get("HTTP_X_STAINLESS_READ_TIMEOUT")
            )
            handler = self._handler(request)
            check_accept(request.META.get("HTTP_ACCEPT"), self.renderer_classes)
            if not self.public:
                await self._authenticate(gateway_request, timeout)
                await self._parse_large_body(gateway_request)
            response = await self._run_idempotent(handler, gateway_request, *args, **kwargs)
        except Exception as error:
            if (ctx := getattr(request, "ctx", None)) is not None:
                log_rejected_request(ctx, error)
            scope[ERROR] = as_quire_error(error).code  # for the access log
            response = self.render_exception(gateway_request, error)
            if response.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
                response["Allow"] = ", ".join(self.allowed_methods)
        response["X-Request-Id"] = gateway_request.request_id
        elapsed = time.perf_counter() - gateway_request.received
        response["openai-processing-ms"] = str(round(elapsed * 1000))
        return response

    def render_exception(self, request: GatewayRequest, error: Exception) -> HttpResponse:
        return self.render_error(error, request.request_id)

    def _handler(self, request: HttpRequest) -> Handler:
        method = (request.method or "").lower()
        if method == "head" and not hasattr(self, "head"):
            method = "get"
        handler = getattr(self, method, None) if method in self.http_method_names else None
        if handler is None or method == "options":
            raise MethodNotAllowed(request.method or "")
        return cast(Handler, handler)

    async def _run_idempotent(
        self, handler: Handler, request: GatewayRequest, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        """The handler's response, or the one stored for the idempotency key."""
        key = request.META.get("HTTP_IDEMPOTENCY_KEY")
        if key is None or request.method != "POST" or self.public:
            return await handler(request, *args, **kwargs)
        if request.content_type == "multipart/form-data":
            raise UnsupportedField(
                "Idempotency-Key is not supported for uploads.", param="Idempotency-Key"
            )
        same = fingerprint(
            "POST", request.get_full_path(), await self._idempotency_fingerprint(request)
        )

        async def handle(pending: PendingIdempotentResponse) -> HttpResponseBase:
            request.ctx = replace(request.ctx, pending_response=pending)
            return await handler(request, *args, **kwargs)

        return await IdempotencyKey.of(key, request.caller.tenant_id, same).run(handle)

    async def _idempotency_fingerprint(self, request: GatewayRequest) -> bytes:
        if not self.streams_request_body:
            return request.body
        file = request.scope[BODY]
        return (await run_in_file_thread(hashlib.file_digest, file, "sha256")).digest()

    async def _authenticate(self, request: GatewayRequest, timeout: ClientTimeout) -> None:
        authenticators = cast(list[ApiKeyAuthentication], self.get_authenticators())
        for authenticator in authenticators:
            request.caller, _ = await authenticator.authenticate(request)
        bind_request(tenant=request.caller.tenant)
        # Only requests to models are logged, not reads.
        logged = request.method == "POST" and self.required_scope == scopes.INFERENCE
        client_id = request.META.get("HTTP_X_REQUEST_ID")
        ours = "" if request.request_id == client_id else request.request_id
        request.ctx = RequestContext(
            caller=request.caller,
            request_id=request.request_id,
            ids=RequestIds(ours.removeprefix("req-")),
            received_at=request.received,
            last_event_id=request.META.get("HTTP_LAST_EVENT_ID"),
            client_timeout=timeout,
            record=RequestRecord(endpoint_of(request.path_info)) if logged else None,
        )
        request.scope[TENANT] = request.caller.tenant
        request.scope[KEY] = str(request.caller.key_id or "")
        for permission in self.get_permissions():
            cast(HasScope, permission).check(request.caller, self.required_scope)
        request.caller.check_endpoint(request.path_info)
        if not (self.generates and request.method == "POST"):
            for throttle in self.get_throttles():
                await cast(KeyRateThrottle, throttle).check(request.caller, self.call_cost)

    async def _parse_large_body(self, request: GatewayRequest) -> None:
        """Parse a large body in a thread, so that it doesn't block other streams."""
        if self.streams_request_body:
            return
        body = request.body if request.content_type == "application/json" else b""
        if LARGE_BYTES < len(body) <= settings.QUIRE.max_body_bytes:
            request.ctx = replace(request.ctx, is_large=True)
            request.parsed = await request.ctx.offload(parse_object, body)

    def read_json(self, request: GatewayRequest) -> dict[str, Any]:
        """The body as a JSON object. Raises 413, 415 and 400 errors.

        Unless the body sets `stream`, it also clears the event id in `request.ctx` from which a
        stream would be resumed.
        """
        check_content_type(request.content_type or "")
        check_content_encoding(request.META.get("HTTP_CONTENT_ENCODING"))
        body, max_bytes = request.body, settings.QUIRE.max_body_bytes
        if len(body) > max_bytes:
            raise PayloadTooLarge(f"The request body is over the limit of {max_bytes} bytes.")
        parsed: dict[str, Any] | None = getattr(request, "parsed", None)
        if parsed is None:
            parsed = parse_object(body)
        if (record := request.ctx.record) is not None:
            model = parsed.get("model")
            record.model = model[:200] if isinstance(model, str) else ""
            record.stream = parsed.get("stream") is True
            bind_request(model=record.model)
        if not parsed.get("stream"):
            request.ctx = replace(request.ctx, last_event_id=None)
        return parsed


class NotFoundView(GatewayView):
    """Any path of the API that doesn't exist, with any method."""

    public = True
    is_not_found_view = True

    def _handler(self, request: HttpRequest) -> Handler:
        raise path_not_found(request.path_info)


def json_response(body: Any, status: int = 200) -> HttpResponse:
    """JSON, or `bytes` of it, as a response, with its length: no middleware adds it later.

    A 503 asks the client to retry after a second, unless the caller sets another time.
    """
    encoded = body if isinstance(body, bytes) else _encode(body)
    response = HttpResponse(encoded, content_type="application/json", status=status)
    response["Content-Length"] = str(len(encoded))
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        response["Retry-After"] = "1"
    return response
