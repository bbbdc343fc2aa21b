"""Redis connections of this app: a pipelined link an event loop, and plain clients for threads."""

import asyncio
import threading

import redis
from django.conf import settings

from engine.contract import redis_clients
from engine.contract.redis_link import RedisLink


class _Current(threading.local):
    """This thread's loop and its link."""

    loop: asyncio.AbstractEventLoop | None = None
    url: str = ""
    link: RedisLink | None = None


_current = _Current()


def redis_link() -> RedisLink:
    """The running loop's link. It connects when needed and stays connected."""
    loop = asyncio.get_running_loop()
    if _current.link is None or _current.loop is not loop or _current.url != settings.REDIS_URL:
        _current.link = RedisLink(settings.REDIS_URL, timeout_s=redis_clients.TIMEOUT_S)
        _current.loop, _current.url = loop, settings.REDIS_URL
    return _current.link


async def close_redis_link() -> None:
    """Close this loop's link."""
    if _current.link is not None and _current.loop is asyncio.get_running_loop():
        await _current.link.close()
        _current.link = None


def sync_client(*, block_s: float = 0.0) -> redis.Redis:
    """A client for a thread of its own, which closes it. `block_s`: its longest blocking read."""
    return redis_clients.sync_client(settings.REDIS_URL, block_s=block_s)


def key(name: str) -> str:
    """A key under the installation's prefix."""
    return f"{settings.QUIRE['KEY_PREFIX']}:{name}"
