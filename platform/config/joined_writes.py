"""A response's head and the first bytes of its body in one write to the socket.

ASGI tells them apart, and uvicorn writes each as it comes: two system calls, two packets and a
client that wakes up twice. Here the head waits for what follows it in the same turn of the loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: How uvicorn's writes of a head begin. A body that does is at most a turn of the loop late.
_HEAD = b"HTTP/1.1 "


class JoinedWrites:
    """A transport that holds a head back until the next write, or the loop's next turn."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._buffer = transport, b""
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes) -> None:
        """Write at once, with a head that waits, unless it's a head itself."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        elif data.startswith(_HEAD):
            self._buffer = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Close after what waits."""
        self._flush()
        self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection over (a WebSocket), with nothing left here."""
        self._flush()
        self._transport.set_protocol(protocol)

    def _flush(self) -> None:
        if self._buffer:
            data, self._buffer = self._buffer, b""
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class JoinedWritesProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol on `JoinedWrites`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the loop for each connection."""
        super().connection_made(JoinedWrites(transport))  # type: ignore[arg-type]
