"""The engine client's connection to Redis."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from inference.engine_client.outbox import BLOCK_MS

#: Of a command. A blocking read may take `BLOCK_MS` on top.
SOCKET_TIMEOUT_S = 5.0


def connect(url: str) -> Redis:
    """A Redis client that never repeats a command by itself: an XADD must not happen twice."""
    return Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=SOCKET_TIMEOUT_S + BLOCK_MS / 1000,
        socket_connect_timeout=SOCKET_TIMEOUT_S,
    )
