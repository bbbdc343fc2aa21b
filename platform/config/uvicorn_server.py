"""uvicorn with a shutdown that clients understand."""

from __future__ import annotations

import asyncio
from functools import partial

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from common.draining import SETTLE_S, is_busy
from inference.engine_client.client import get_engine_client

CLOSE_REASON = "The gateway is shutting down: connect again to resume."
#: Seconds between checks whether a WebSocket's answers are finished.
POLL_INTERVAL_S = 0.1


class GatewayServer(uvicorn.Server):
    """Fails unfinished requests after the grace period, so that each stream ends with an event."""

    def __init__(self, config: uvicorn.Config, grace: float) -> None:
        """`grace`: seconds that open requests have to finish."""
        super().__init__(config)
        self._grace = grace

    async def _wait_tasks_to_complete(self) -> None:
        """Called by uvicorn, which on TimeoutError cancels unfinished requests: streams whose
        clients don't read. The application's own shutdown gets the other half of `SETTLE_S`.
        """
        waiting = asyncio.ensure_future(super()._wait_tasks_to_complete())
        await asyncio.wait([waiting], timeout=self._grace)
        get_engine_client().fail_all()
        # Counted from here, so that a process without CPU time at the deadline cuts no stream.
        async with asyncio.timeout(SETTLE_S / 2):
            await waiting


class GatewayWebSocketProtocol(WebSocketsSansIOProtocol):
    """Closes WebSockets with a reason. Pages reconnect at once, and their answers continue."""

    def shutdown(self) -> None:
        """Called by uvicorn at shutdown: closes with code 1012 once no answer is in progress."""
        if self.transport.is_closing():
            return
        if self.handshake_complete and is_busy(self.scope["state"]):
            self.loop.call_later(POLL_INTERVAL_S, self.shutdown)
            return
        self.conn.send_close = partial(  # type: ignore[method-assign]
            self.conn.send_close, reason=CLOSE_REASON
        )
        super().shutdown()
