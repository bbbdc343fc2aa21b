"""`RequestLog`: metrics and the access log line of an HTTP request, when its response ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from common.redaction import without_tokens
from inference.metrics.definitions import NONE
from inference.metrics.recorder import recorder
from inference.request.context import is_safe_request_id
from inference.tracing import request_span
from inference.web.views import ERROR, HANDLER, KEY, RECEIVED, TENANT

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Scope = MutableMapping[str, Any]

access_log = logging.getLogger("quire.access")
#: Paths that are polled every few seconds.
UNLOGGED_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/metrics", "/load"})
#: The status that nginx logs when the client closed the connection.
CLIENT_LEFT = 499


class RequestLog:
    """Passes a response on, and records its status, size and request id.

    Call `log_completed` when nothing more is sent. The log line contains no query, headers, bodies
    or tokens.
    """

    __slots__ = (
        "_request_id",
        "_scope",
        "_send",
        "_sent",
        "_span",
        "_started",
        "_status",
        "completed",
    )

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._started = time.perf_counter()
        self._status = self._sent = 0
        self._request_id = b""
        self.completed = False
        self._span = request_span(scope)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """ASGI's `send`."""
        if message["type"] == "http.response.body":
            self._sent += len(message.get("body", b""))
            self.completed = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            self._status = message["status"]
            if self._span is not None:
                message["headers"] = [*message["headers"], self._span.response_header]
            for name, value in message["headers"]:
                if name.lower() == b"x-request-id":
                    self._request_id = value
        await self._send(message)

    def log_completed(self, *, of_api: bool) -> None:
        """Count the request, and write its line if access logging is enabled."""
        seconds, scope = time.perf_counter() - self._started, self._scope
        status = self._status if self.completed else CLIENT_LEFT
        if of_api:
            recorder.http(
                handler=scope.get(HANDLER, NONE),
                method=scope["method"],
                status=status,
                seconds=seconds,
                received=scope.get(RECEIVED, 0),
                sent=self._sent,
            )
        if self._span is not None:
            self._span.end(
                scope.get(HANDLER, ""),
                status,
                scope.get(TENANT, ""),
                self._request_id.decode("latin1"),
                scope.get(ERROR, ""),
            )
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        level = logging.DEBUG if path in UNLOGGED_PATHS else logging.INFO
        if access_log.isEnabledFor(level):
            self._log(level, status, seconds)

    def _log(self, level: int, status: int, seconds: float) -> None:
        scope = self._scope
        theirs = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"")
        client = scope.get("client") or ("",)
        fields = {
            "client": client[0],
            "method": scope["method"],
            "path": without_tokens(scope["path"]),
            "status": status,
            "duration_ms": round(seconds * 1000, 1),
            "bytes": self._sent,
            "request_id": self._request_id.decode("latin1"),
            "client_request_id": is_safe_request_id(theirs.decode("latin1")),
            "tenant": scope.get(TENANT, ""),
            "key": scope.get(KEY, ""),
            "error": scope.get(ERROR, ""),
        }
        if self._span is not None:
            fields["trace_id"] = self._span.trace_id
        text = "%(client)s %(method)s %(path)s %(status)d %(duration_ms).1f ms %(request_id)s"
        access_log.log(level, text, fields, extra={"access": fields})


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
ASGISend = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, ASGISend], Awaitable[None]]

ACTIVE = Gauge("vllm:websocket_connections_active", "WebSockets that are open.")
OPENED = Counter("vllm:websocket_connections", "WebSockets that were opened.")
SECONDS = Histogram(
    "vllm:websocket_connection_duration_seconds",
    "Seconds from a WebSocket's opening to its end.",
    buckets=(0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)


def count_websockets(application: Application) -> Application:
    """Wrap the application so that accepted WebSockets are counted under vLLM's metric names.

    Messages that it sends after a socket was closed, or its client left, are dropped: servers raise
    an error for them, and `receive` reports the end to the application.
    """

    async def counting(scope: Message, receive: Receive, send: ASGISend) -> None:
        opened: list[float] = []
        is_closed = False

        async def noting(message: Message) -> None:
            nonlocal is_closed
            if message["type"] == "websocket.accept" and not opened:
                opened.append(time.monotonic())
                OPENED.inc()
                ACTIVE.inc()
            if is_closed:
                return
            is_closed = message["type"] == "websocket.close"
            try:
                await send(message)
            except OSError:
                is_closed = True

        try:
            await application(scope, receive, noting)
        finally:
            if opened:
                ACTIVE.dec()
                SECONDS.observe(time.monotonic() - opened[0])

    return counting
