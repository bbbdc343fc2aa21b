"""The data plane's ASGI handler: Django's, reduced to what an API request needs.

Django's stock handler spools the body without a limit, fires request signals and runs each
synchronous middleware in a thread, which costs 1 to 2 ms a request. This one resolves the same URLs
to the same views, reads the body within limits, and cancels the view when the client goes away. It
fires no request signals, so code below it that uses the ORM closes stale connections itself
(`common.db`).
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from functools import lru_cache, partial
from typing import IO, Any, cast

from corsheaders.middleware import CorsMiddleware
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import Resolver404, ResolverMatch, get_resolver
from django.urls.base import set_script_prefix

from common.log_context import bind_request, end_request
from engine.contract.errors import EngineOverloaded, QuireError
from inference.api.anthropic.errors import anthropic_error
from inference.edge.body import (
    BodyLimitMiddleware,
    authenticate_scope,
    is_upload,
    read_body,
    read_upload,
    tenant_hint,
)
from inference.edge.load_shedding import shed_load
from inference.edge.request_log import RequestLog
from inference.engine_client.client import get_engine_client
from inference.errors import Overloaded, PayloadTooLarge, error_response
from inference.generation.model_resolution import check_any_queue
from inference.loop.fair_dispatch import start_dispatch
from inference.request.context import (
    RequestContext,
    RequestRecord,
    endpoint_of,
    log_rejected_request,
    sanitize_request_id,
)
from inference.web.responses import EventStreamResponse, LastChunk, resource_closers
from inference.web.views import (
    ARRIVED,
    ERROR,
    HANDLER,
    KEY,
    RECEIVED,
    REQUEST_ID,
    TENANT,
    ClientDisconnected,
    GatewayView,
    Receive,
    Scope,
    path_not_found,
)

logger = logging.getLogger(__name__)


def _nothing(request: HttpRequest) -> HttpResponseBase:
    return HttpResponse()


#: Decides which other sites' pages may call the API from a browser: none unless
#: `QUIRE_CORS_ORIGINS` lists them. Only requests with an `Origin` header are checked.
_cors = CorsMiddleware(_nothing)


def preflight(request: HttpRequest) -> HttpResponseBase | None:
    """The response to a CORS preflight; None for any other request."""
    if "HTTP_ORIGIN" not in request.META or request.method != "OPTIONS":
        return None
    response = _cors.check_preflight(request)
    return None if response is None else _cors.add_response_headers(request, response)


def allow(request: HttpRequest, response: HttpResponseBase) -> None:
    """Add the CORS headers that allow the page to read this response."""
    if "HTTP_ORIGIN" in request.META:
        _cors.add_response_headers(request, response)


Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

URLCONF = "inference.urls"
#: Paths that this handler serves besides everything below /v1; must match `inference.urls`.
PATHS = frozenset(
    f"/{name}"
    for name in (
        *("v1", "health", "live", "ready", "ping", "version", "metrics"),
        *("tokenize", "detokenize"),
        *("reset_prefix_cache", "sleep", "wake_up", "is_sleeping"),
        *("scale_elastic_ep", "is_scaling_elastic_ep", "get_world_size"),
        *("load", "server_info", "openapi.json"),
        *("pooling", "classify", "score", "rerank", "v2/rerank"),
        *("generate", "invocations", "inference/v1/generate"),
        *("reset_mm_cache", "reset_encoder_cache", "pause", "resume", "is_paused"),
        *("abort_requests", "start_profile", "stop_profile", "collective_rpc", "tokenizer_info"),
    )
)

#: Path whose clients expect Anthropic's error envelope.
ANTHROPIC = "/v1/messages"
#: Seconds after which the request of a disconnected client is cancelled again.
CANCEL_RETRY_S = 0.5


class GatewayHandler(ASGIHandler):
    """Serves `inference.urls`. Tested with uvicorn, granian and daphne."""

    def load_middleware(self, is_async: bool = False) -> None:
        """Load none: views authenticate, limit and render errors themselves."""
        self._view_middleware: list[Any] = []
        self._middleware_chain = self._get_response_async  # type: ignore[attr-defined]  # no stub

    async def __call__(  # type: ignore[override]  # Django's messages are read-only
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve one request; return when the response is sent or the client has disconnected."""
        try:
            if is_upload(scope, gateway_path(scope)):
                body: IO[bytes] = await read_upload(scope, receive)
            else:
                read = await read_body(scope, receive, partial(self._allows_large_body, scope))
                scope[RECEIVED] = len(read)
                body = io.BytesIO(read)
                refused = await self._refused_early(scope, read)
                if refused is not None:
                    await self.send_response(refused, send)
                    return
        except ClientDisconnected:
            return
        except QuireError as error:
            await self.send_response(self._refused(scope, error), send)
            return
        with body:
            scope[ARRIVED] = time.perf_counter()
            if scope["method"] == "POST":
                await start_dispatch.current().wait(tenant_hint(scope))
            request, response = self.create_request(scope, body)
            if request is None:
                await self.send_response(cast(HttpResponseBase, response), send)
                return
            await self._serve_while_connected(request, receive, send)

    @staticmethod
    async def _allows_large_body(scope: Scope) -> None:
        """Raise unless the path accepts large bodies, the sender is authenticated, and a queue that
        the request may enter has room: it can be rejected before its body is read.
        """
        path = gateway_path(scope)
        try:
            view = _resolve(path).func
        except Resolver404:
            raise path_not_found(path) from None
        view_class = getattr(view, "cls", None) or getattr(view, "view_class", None)
        if getattr(view_class, "is_not_found_view", False):
            raise path_not_found(path)
        if getattr(view_class, "public", False):
            raise PayloadTooLarge("This path accepts no large bodies.")
        caller = await authenticate_scope(scope)
        headers = {name for name, _ in scope["headers"]}
        if getattr(view_class, "queues_for_model", False) and b"idempotency-key" not in headers:
            try:
                await check_any_queue(caller)
            except (EngineOverloaded, Overloaded) as error:
                record = RequestRecord(endpoint_of(path))
                log_rejected_request(
                    RequestContext(caller=caller, request_id=_request_id(scope), record=record),
                    error,
                )
                scope[TENANT], scope[KEY] = caller.tenant, str(caller.key_id or "")
                bind_request(tenant=caller.tenant)
                raise

    @staticmethod
    async def _refused_early(scope: Scope, body: bytes) -> HttpResponseBase | None:
        """The rejection of a request by a full queue; None if a view must handle the request."""
        if scope["method"] != "POST" or not get_engine_client().rejected_recently:
            return None
        path = gateway_path(scope)
        try:
            match = _resolve(path)
        except Resolver404:
            return None
        view = getattr(match.func, "view_class", None)
        if view is None or not issubclass(view, GatewayView):
            return None
        request_id = _request_id(scope)
        error = await shed_load(scope, path, body, view, request_id)
        if error is None:
            return None
        scope[HANDLER] = f"/{match.route}"
        refusal = _error_for_path(path, error, request_id)
        refusal["openai-processing-ms"] = str(round((time.perf_counter() - scope[ARRIVED]) * 1000))
        return refusal

    def _refused(self, scope: Scope, error: QuireError) -> HttpResponseBase:
        """The response to a request whose body wasn't read, and which reached no view."""
        request, response = self.create_request(scope, io.BytesIO())
        if request is None:
            return cast(HttpResponseBase, response)
        scope[ERROR] = error.code
        refusal = _error_for_path(gateway_path(scope), error, _request_id(scope))
        # The rest of the body is not read, so the connection can't be reused.
        refusal["Connection"] = "close"
        allow(request, refusal)
        return refusal

    async def _serve_while_connected(
        self, request: HttpRequest, receive: Receive, send: Send
    ) -> None:
        """Run the view and send its response; cancel both when the client disconnects."""
        task = asyncio.current_task()
        is_disconnected = False

        async def watch() -> None:
            nonlocal is_disconnected
            while (await receive())["type"] != "http.disconnect":
                pass
            is_disconnected = True
            while task is not None:
                task.cancel()
                # Cancel repeatedly: Python 3.11's `wait_for`, below the Redis client, swallows a
                # cancellation that coincides with its result.
                await asyncio.sleep(CANCEL_RETRY_S)

        watcher = asyncio.create_task(watch())
        response = None
        try:
            response = await self.get_response_async(request)
            await self.send_response(response, send)
        except asyncio.CancelledError:
            if not is_disconnected or task is None:
                raise
            # Our own cancellation: the client has closed the connection.
            while task.uncancel():
                pass
        except OSError:
            # With some servers, a write fails once the client has disconnected.
            logger.debug("The client closed the connection while a response was sent.")
        finally:
            watcher.cancel()
            if response is not None:
                _run_closers(response)

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        """Resolve the URL and run its view."""
        asked = preflight(request)
        if asked is not None:
            return asked
        response = await self._view_response(request)
        allow(request, response)
        return response

    async def _view_response(self, request: HttpRequest) -> HttpResponseBase:
        try:
            match = _resolve(request.path_info)
            request.resolver_match = match
            if not match.route.startswith("^"):  # such a route is a catch-all for unknown paths
                scope = cast(Scope, cast(ASGIRequest, request).scope)
                scope[HANDLER] = f"/{match.route}"
            return await match.func(request, *match.args, **match.kwargs)
        except Exception as error:
            return error_response(error)

    async def send_response(self, response: HttpResponseBase, send: Send) -> None:
        """Send a response. Streams are sent chunk by chunk, as soon as a chunk is available."""
        if not isinstance(response, EventStreamResponse):
            await super().send_response(response, cast(Any, send))
            return
        headers = [(k.encode("ascii"), v.encode("latin1")) for k, v in response.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(response.events) as events:
            async for chunk in events:
                last = isinstance(chunk, LastChunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": not last})
                if last:
                    return
        await send({"type": "http.response.body"})


def _request_id(scope: Scope) -> str:
    """Id of a request before it reaches a view; the same on every call."""
    if (request_id := scope.get(REQUEST_ID)) is not None:
        return str(request_id)
    theirs = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    sanitized = scope[REQUEST_ID] = sanitize_request_id(theirs.decode("latin1"))
    bind_request(request_id=sanitized)
    return sanitized


def _error_for_path(path: str, error: QuireError, request_id: str) -> HttpResponse:
    """The error response to a request that reached no view."""
    anthropic = path.startswith(ANTHROPIC)
    refusal = (anthropic_error if anthropic else error_response)(error, request_id)
    refusal["X-Request-Id"] = request_id
    if anthropic:
        refusal["request-id"] = request_id
    return refusal


@lru_cache(maxsize=1024)
def _resolve(path: str) -> ResolverMatch:
    """The view for a path. Raises `Resolver404`, which is not cached."""
    return get_resolver(URLCONF).resolve(path)


def _run_closers(response: HttpResponseBase) -> None:
    """Run the response's closers. Django's `close` would also send a signal."""
    for closer in resource_closers(response):
        closer()


def gateway_path(scope: Scope) -> str:
    """The path relative to the mount point of the application."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root) else path


def is_gateway_path(scope: Scope) -> bool:
    """Whether the data plane serves this path. Not an access check: views authenticate."""
    path = gateway_path(scope)
    return path in PATHS or path.startswith("/v1/")


def http_application(django_application: Application) -> Application:
    """Route the API to `GatewayHandler` and everything else to Django's own handler."""
    gateway, pages = GatewayHandler(), BodyLimitMiddleware(django_application)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        set_script_prefix(scope.get("root_path", "") or "/")
        end_request()  # a server may start a request in the task of the connection's previous one
        of_api, exchange = is_gateway_path(scope), RequestLog(scope, send)
        try:
            if of_api:
                await gateway(scope, receive, exchange.send)
            else:
                await pages(scope, receive, exchange.send, gateway_path(scope))
        finally:
            exchange.log_completed(of_api=of_api)

    return application
