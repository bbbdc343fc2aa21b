"""Redis connections of this app: one pipelined link per event loop, plain clients for threads."""

import asyncio
import threading
from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any

import redis
from django.conf import settings
from redis.exceptions import NoScriptError

from engine.system import redis_client
from engine.system.redis_client import RedisPipeline


class ThreadRedis(threading.local):
    """This thread's event loop and its link."""

    loop: asyncio.AbstractEventLoop | None = None
    url: str = ""
    link: RedisPipeline | None = None


_current = ThreadRedis()


def redis_link() -> RedisPipeline:
    """The running loop's link. It connects on first use and stays connected."""
    loop = asyncio.get_running_loop()
    if _current.link is None or _current.loop is not loop or _current.url != settings.REDIS_URL:
        _current.link = RedisPipeline(settings.REDIS_URL, timeout_s=redis_client.TIMEOUT_S)
        _current.loop, _current.url = loop, settings.REDIS_URL
    return _current.link


async def close_redis_link() -> None:
    """Close this loop's link."""
    if _current.link is not None and _current.loop is asyncio.get_running_loop():
        await _current.link.close()
        _current.link = None


def sync_client(*, block_s: float = 0.0) -> redis.Redis:
    """A client for a single thread, which closes it. `block_s`: its longest blocking read."""
    return redis_client.sync_client(settings.REDIS_URL, block_s=block_s)


def redis_key(name: str) -> str:
    """A key under the installation's prefix."""
    return f"{settings.QUIRE.key_prefix}:{name}"


@cache
def load_script(name: str) -> tuple[str, str]:
    """A script's text and the sha1 by which Redis caches it."""
    text = (Path(__file__).parent / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()


async def run_script(
    link: RedisPipeline, name: str, keys: Sequence[str], arguments: Sequence[Any]
) -> Any:
    """Run by sha1, which is short; send the text if the server has lost its script cache."""
    text, digest = load_script(name)
    try:
        return await link.execute("EVALSHA", digest, len(keys), *keys, *arguments)
    except NoScriptError:
        return await link.execute("EVAL", text, len(keys), *keys, *arguments)
