"""`Exchange`: what is known of an HTTP request once its response has ended: metrics, a log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from inference.metrics import recorder
from inference.metrics.definitions import NONE
from inference.tracing import request_span
from inference.web.request_ids import harmless
from tenants.redaction import without_tokens

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Scope = MutableMapping[str, Any]

access_log = logging.getLogger("quire.access")
#: Asked every few seconds by machines.
_QUIET = frozenset({"/health", "/ping", "/metrics", "/load"})
#: What nginx logs for a client that didn't wait.
CLIENT_LEFT = 499
#: Where in the scope views leave what they learn of a request.
HANDLER, RECEIVED = "quire.handler", "quire.received"
#: When (`time.perf_counter`) a request was there whole, before it waited for its turn.
ARRIVED = "quire.arrived"
TENANT, KEY, ERROR = "quire.tenant", "quire.key", "quire.error"
#: By which a request is told apart that was refused before a view gave it its id.
REQUEST_ID = "quire.request_id"


class Exchange:
    """Passes a response on and notes its status, size and request id.

    Call `ended` when nothing more is sent. The line of the log has no query, headers, bodies or
    tokens.
    """

    __slots__ = (
        "_request_id",
        "_scope",
        "_send",
        "_sent",
        "_span",
        "_started",
        "_status",
        "ended_whole",
    )

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._started = time.perf_counter()
        self._status = self._sent = 0
        self._request_id = b""
        self.ended_whole = False
        self._span = request_span(scope)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """ASGI's `send`."""
        if message["type"] == "http.response.body":
            self._sent += len(message.get("body", b""))
            self.ended_whole = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            self._status = message["status"]
            if self._span is not None:
                message["headers"] = [*message["headers"], self._span.response_header]
            for name, value in message["headers"]:
                if name.lower() == b"x-request-id":
                    self._request_id = value
        await self._send(message)

    def ended(self, *, of_api: bool) -> None:
        """Count it, and write its line where access lines are wanted."""
        seconds, scope = time.perf_counter() - self._started, self._scope
        status = self._status if self.ended_whole else CLIENT_LEFT
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
        level = logging.DEBUG if path in _QUIET else logging.INFO
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
            "client_request_id": harmless(theirs.decode("latin1")),
            "tenant": scope.get(TENANT, ""),
            "key": scope.get(KEY, ""),
            "error": scope.get(ERROR, ""),
        }
        if self._span is not None:
            fields["trace_id"] = self._span.trace_id
        text = "%(client)s %(method)s %(path)s %(status)d %(duration_ms).1f ms %(request_id)s"
        access_log.log(level, text, fields, extra={"access": fields})
