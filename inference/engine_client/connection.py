"""The engine client's connections to Redis."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from engine.contract.redis_link import RedisLink
from inference.engine_client.outbox import BLOCK_MS

#: Of a command. A blocking read may take `BLOCK_MS` on top.
SOCKET_TIMEOUT_S = 5.0


def connect(url: str) -> Redis:
    """A client for what is asked a few times a second. It repeats no command by itself."""
    return Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=SOCKET_TIMEOUT_S,
    )


def short_link(url: str) -> RedisLink:
    """For requests, on their way in and out."""
    return RedisLink(url, timeout_s=SOCKET_TIMEOUT_S)


def reading_link(url: str) -> RedisLink:
    """For blocking reads, which would hold up any other command."""
    return RedisLink(url, timeout_s=SOCKET_TIMEOUT_S + BLOCK_MS / 1000)
