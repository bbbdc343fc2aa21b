"""What the engine has written for this gateway and the gateway has read: kept in Redis too.

What is read is trimmed from the outbox. Should this process be killed, another one bills its
requests from these counts and from what waits in the outbox.
"""

from __future__ import annotations

import time

from engine.contract import protocol
from engine.contract.protocol import OutboxBatch
from engine.contract.redis_link import RedisLink

#: A request that has ended is settled within so long.
FORGET_ENDED_S = 15.0
#: One of which nothing more was heard was aborted.
FORGET_SILENT_S = 600.0

_SAVE = """
redis.call('DEL', KEYS[1])
if #ARGV > 2 then redis.call('HSET', KEYS[1], unpack(ARGV, 3)) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('XTRIM', KEYS[2], 'MINID', '=', ARGV[1])
"""


class Progress:
    """Output tokens by request and output."""

    def __init__(self, gateway_id: str, prefix: str) -> None:
        self._keys = (
            protocol.progress_key(gateway_id, prefix),
            protocol.outbox_key(gateway_id, prefix),
        )
        #: "request/output" -> tokens, and when it may be forgotten.
        self._counts: dict[str, tuple[int, float]] = {}

    def note(self, batch: OutboxBatch) -> None:
        """A batch was read."""
        now = time.monotonic()
        for delta in batch.deltas:
            name = f"{protocol.first_attempt(delta.request_id)}/{delta.index}"
            so_far = delta.start + len(delta.token_ids)
            known = self._counts.get(name)
            if known is not None:
                so_far = max(so_far, known[0])
            keep = FORGET_ENDED_S if delta.finish_reason else FORGET_SILENT_S
            self._counts[name] = (so_far, now + keep)

    async def save_and_trim(self, link: RedisLink, min_id: str) -> None:
        """Write the counts and trim the outbox before `min_id`, both or neither."""
        now = time.monotonic()
        self._counts = {name: kept for name, kept in self._counts.items() if kept[1] > now}
        values = [word for name, (count, _) in self._counts.items() for word in (name, count)]
        # Lua's `unpack` takes some thousands of values: more requests than that are left out.
        await link.execute(
            "EVAL", _SAVE, 2, *self._keys, min_id, protocol.OUTBOX_TTL_S, *values[-6000:]
        )
