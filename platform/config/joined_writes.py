"""Writes a response's head and the first bytes of its body to the socket together.

ASGI sends them as two messages, and uvicorn writes each one immediately: two system calls, two
packets, and a client that wakes up twice. Here the head waits for the body until the event loop's
next iteration.
"""

from __future__ import annotations

import asyncio
from typing import Any

from config.ignored_upgrades import IgnoredUpgradesProtocol

#: Prefix of uvicorn's writes of a head. A body with this prefix is at most one iteration late.
_HEAD = b"HTTP/1.1 "


class JoinedWrites:
    """A transport that delays a head until the next write or the event loop's next iteration."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._buffer = transport, b""
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes) -> None:
        """Write immediately, together with a pending head; a head itself is delayed."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        elif data.startswith(_HEAD):
            self._buffer = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Flush a pending head and close."""
        self._flush()
        self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Flush a pending head and hand the connection over to another protocol (a WebSocket)."""
        self._flush()
        self._transport.set_protocol(protocol)

    def _flush(self) -> None:
        if self._buffer:
            data, self._buffer = self._buffer, b""
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class JoinedWritesProtocol(IgnoredUpgradesProtocol):
    """uvicorn's HTTP protocol on `JoinedWrites`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop for each connection."""
        super().connection_made(JoinedWrites(transport))  # type: ignore[arg-type]
