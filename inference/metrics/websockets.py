"""WebSockets of this process, under vLLM's names: how many are open, were opened, and for how long.

They are among what each process says of itself, so those of all processes add up.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

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


def counted(application: Application) -> Application:
    """The application, its accepted WebSockets counted."""

    async def counting(scope: Message, receive: Receive, send: ASGISend) -> None:
        opened: list[float] = []

        async def noting(message: Message) -> None:
            if message["type"] == "websocket.accept" and not opened:
                opened.append(time.monotonic())
                OPENED.inc()
                ACTIVE.inc()
            await send(message)

        try:
            await application(scope, receive, noting)
        finally:
            if opened:
                ACTIVE.dec()
                SECONDS.observe(time.monotonic() - opened[0])

    return counting
