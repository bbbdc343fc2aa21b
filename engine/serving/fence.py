"""One process at a time serves under a replica's id: who comes later shuts out who was there.

A process that stood still (stopped, swapped out, cut off from Redis) and was replaced doesn't know
it when it wakes up. So a replica's first heartbeat writes its incarnation down, and all that it
writes is written by scripts that look whose id it is by then.
"""

from __future__ import annotations

import time

import redis

from engine.contract import protocol

#: The beginning of a script: ends it with 0 unless KEYS[1], the owner, is nobody or ARGV[1].
UNLESS_TAKEN = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
"""
#: Who was silent for so long may have been replaced.
_DOUBT_AFTER_S = 1.0


class FencedOff(Exception):
    """Another process serves under this replica id by now."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(f"Another process serves as {replica_id} by now; this one ends.")


class Fence:
    """A thread's knowledge of whether the replica's id is still its own.

    Args:
        incarnation: this process's.
    """

    def __init__(self, client: redis.Redis, prefix: str, replica_id: str, incarnation: str) -> None:
        self._redis, self._replica_id, self._incarnation = client, replica_id, incarnation
        self.key = protocol.owner_key(replica_id, prefix)
        self._looked_at = time.monotonic()

    def check(self) -> None:
        """Before anything is taken from Redis: look who owns the id, if this thread stood still.

        Raises: `FencedOff`; redis.RedisError, and then the next call looks again.
        """
        now = time.monotonic()
        if now - self._looked_at > _DOUBT_AFTER_S:
            owner = self._redis.get(self.key)
            if owner is not None and owner != self._incarnation.encode():
                raise FencedOff(self._replica_id)
        self._looked_at = now
