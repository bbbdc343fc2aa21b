"""uvicorn with an end that clients understand."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from inference.engine_client.client import get_engine_client

#: Seconds from the error that ends a stream until its task is cancelled.
LAST_EVENT_TIMEOUT_S = 1
CLOSE_REASON = "The gateway is shutting down: connect again to resume."


class GatewayServer(uvicorn.Server):
    """At the end of its grace it fails what still runs, so that each stream ends with an event."""

    def __init__(self, config: uvicorn.Config, grace: int) -> None:
        """`grace`: seconds that open requests get."""
        config.timeout_graceful_shutdown = grace + LAST_EVENT_TIMEOUT_S
        super().__init__(config)
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn after SIGTERM or SIGINT."""
        asyncio.get_running_loop().call_later(self._grace, get_engine_client().fail_all)
        await super().shutdown(sockets)


class GatewayWebSocketProtocol(WebSocketsSansIOProtocol):
    """Closes with a reason. Pages connect again at once, and their answers continue."""

    def shutdown(self) -> None:
        """Called by uvicorn when the server ends, with close code 1012."""
        self.conn.send_close = partial(  # type: ignore[method-assign]
            self.conn.send_close, reason=CLOSE_REASON
        )
        super().shutdown()
