"""Limits on a gateway's connections and on the time and size of request headers.

uvicorn bounds none of these: a connection that never sends a request stays open forever, and a
header that never ends fills memory.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from common.draining import draining
from config.joined_writes import JoinedWritesProtocol

#: Maximum connections of one process; further ones get 503. Some file descriptors are reserved for
#: Redis, the database and files.
MAX_CONNECTIONS = 4096
_RESERVED_DESCRIPTORS = 128
#: Seconds from a connection, or from a request's first byte, to the end of the headers.
HEADERS_WITHIN_S = 60.0
#: Maximum consecutive bytes that are neither a complete head nor part of a body: endless headers,
#: trailers or chunk framing. Checked after each read, so one read may exceed it.
MAX_HEAD_BYTES = 64 << 10
#: Maximum headers of one request: parsing 64 KiB of short ones would block the event loop.
MAX_HEADERS = 256
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: 132\r\n\r\n"
    b'{"error":{"message":"Too many connections are open. Try again in a moment.",'
    b'"type":"server_error","param":null,"code":"overloaded"}}'
)
_LONG_HEAD = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: 128\r\n\r\n"
    b'{"error":{"message":"The headers are over 65536 bytes.",'
    b'"type":"invalid_request_error","param":null,"code":"headers_too_large"}}'
)
_MANY_HEADERS = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: 121\r\n\r\n"
    b'{"error":{"message":"There are over 256 headers.",'
    b'"type":"invalid_request_error","param":null,"code":"too_many_headers"}}'
)


class TooManyHeaders(Exception):
    """Aborts the parsing of a request."""


def max_connections() -> int:
    """Maximum number of connections of this process."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(MAX_CONNECTIONS, descriptors - _RESERVED_DESCRIPTORS))


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Wrap a cycle's `send` for HTTP/1.0 clients, which don't support chunked encoding: closing the
    connection ends the body. uvicorn does close it, but would send chunks.
    """
    send = cycle.send
    streams = False

    async def send_without_chunks(message: Any) -> None:
        nonlocal streams
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            streams = b"content-length" not in names
            if streams:
                cycle.chunked_encoding = False
        elif streams:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_without_chunks


class LimitedHttpProtocol(JoinedWritesProtocol):
    """uvicorn's HTTP protocol with the limits of this module."""

    _header_timeout: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop for each connection."""
        super().connection_made(transport)
        self._expect_headers()
        if len(self.connections) > max_connections():
            transport.write(_FULL)
            transport.close()

    def on_message_begin(self) -> None:
        """Called at a request's first byte."""
        super().on_message_begin()
        self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Raises `TooManyHeaders`."""
        if len(self.headers) >= MAX_HEADERS:
            raise TooManyHeaders
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that can't be parsed (400) or has too many headers (431)."""
        if len(self.headers) < MAX_HEADERS:
            super().send_400_response(msg)
            return
        if self._header_timeout is not None:  # otherwise a response may have started
            self.transport.write(_MANY_HEADERS)
        self.transport.close()

    def on_headers_complete(self) -> None:
        """Cancel the header timeout; the body has a timeout of its own."""
        self._expect_nothing()
        self._head_bytes = 0
        super().on_headers_complete()
        if draining.is_set():  # closing an idle connection later could cut off a proxy's request
            self.cycle.keep_alive = False
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body, whose size is limited elsewhere."""
        self._head_bytes = 0
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop with received bytes."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self._header_timeout is not None:  # otherwise a response may have started
                self.transport.write(_LONG_HEAD)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop when the connection is closed."""
        self._expect_nothing()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        if self._header_timeout is None:
            self._header_timeout = self.loop.call_later(HEADERS_WITHIN_S, self._close)

    def _expect_nothing(self) -> None:
        if self._header_timeout is not None:
            self._header_timeout.cancel()
            self._header_timeout = None

    def _close(self) -> None:
        self._header_timeout = None
        self.transport.close()
