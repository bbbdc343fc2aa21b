"""Redis connections of this app: one asyncio client an event loop, and plain ones for threads."""

import asyncio
import threading

import redis
from django.conf import settings
from redis import asyncio as aioredis

TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32


class _Current(threading.local):
    """This thread's loop and its client."""

    loop: asyncio.AbstractEventLoop | None = None
    url: str = ""
    client: aioredis.Redis | None = None


_current = _Current()


def async_client() -> aioredis.Redis:
    """The running loop's client. Connections are made when needed and kept."""
    loop = asyncio.get_running_loop()
    if _current.client is None or _current.loop is not loop or _current.url != settings.REDIS_URL:
        # A burst waits for a connection; redis-py's plain pool would refuse it.
        pool = aioredis.BlockingConnectionPool.from_url(
            settings.REDIS_URL,
            max_connections=MAX_CONNECTIONS,
            timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
        )
        _current.client = aioredis.Redis.from_pool(pool)
        _current.loop, _current.url = loop, settings.REDIS_URL
    return _current.client


async def close_async_client() -> None:
    """Close this loop's connections."""
    if _current.client is not None and _current.loop is asyncio.get_running_loop():
        await _current.client.aclose()
        _current.client = None


def sync_client(*, block_s: float = 0.0) -> redis.Redis:
    """A client for a thread of its own, which closes it. `block_s`: its longest blocking read."""
    return redis.Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=TIMEOUT_S + block_s,
        socket_connect_timeout=TIMEOUT_S,
    )


def key(name: str) -> str:
    """A key under the installation's prefix."""
    return f"{settings.QUIRE['KEY_PREFIX']}:{name}"
