"""Locks in Redis for work that one process at a time does for as long as it lives."""

from __future__ import annotations

import redis

from engine.system.redis_client import RedisPipeline

#: KEYS: the lock. ARGV: the holder, the lifetime in ms. Returns whether the holder has the lock.
_ACQUIRE_OR_EXTEND = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


async def hold_lock(link: RedisPipeline, key: str, holder: str, lifetime_s: float) -> bool:
    """Acquire or extend the lock for `lifetime_s` seconds; returns whether `holder` has it now.

    Raises redis.RedisError.
    """
    arguments = (holder, int(lifetime_s * 1000))
    return bool(await link.execute("EVAL", _ACQUIRE_OR_EXTEND, 1, key, *arguments))


def hold_lock_sync(client: redis.Redis, key: str, holder: str, lifetime_s: float) -> bool:
    """Blocking `hold_lock`."""
    return bool(client.eval(_ACQUIRE_OR_EXTEND, 1, key, holder, int(lifetime_s * 1000)))
