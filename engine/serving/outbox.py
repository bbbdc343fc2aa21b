"""Writes steps' outputs to gateways' streams, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import redis

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import OutboxBatch
from engine.serving.inbox import WRITE_IF_CURRENT, IncarnationReplaced
from engine.system.host import request_short_time_slice
from engine.system.redis_client import is_temporary

log = logging.getLogger(__name__)

_RETRY_S = 0.5
#: Steps that are written together at most.
_MAX_STEPS = 256
#: KEYS: the owner, the inbox, what is written of open requests, an outbox a batch.
#: ARGV: incarnation, the consumer group, the most entries of an outbox, its expiry, how many inbox
#: entries are done, the batches in the order of their outboxes, these inbox entries, and what is
#: written: fields and values.
#: A live gateway keeps renewing its stream's expiry. Where there is none, the stream has just been
#: made anew: its gateway died and it expired, and nobody else would remove it.
_WRITE = (
    WRITE_IF_CURRENT
    + """
local count, done = #KEYS - 3, tonumber(ARGV[5])
for i = 1, count do
  local stream = KEYS[3 + i]
  redis.call('XADD', stream, 'MAXLEN', '~', ARGV[3], '*', 'm', ARGV[5 + i])
  redis.call('EXPIRE', stream, ARGV[4], 'NX')
end
for i = 6 + count, 5 + count + done do
  redis.call('XACK', KEYS[2], ARGV[2], ARGV[i])
  redis.call('XDEL', KEYS[2], ARGV[i])
end
for i = 6 + count + done, #ARGV, 1000 do
  redis.call('HSET', KEYS[3], unpack(ARGV, i, math.min(i + 999, #ARGV)))
end
return 1
"""
)


@dataclass(slots=True)
class StepOutput:
    """Output of one step: a batch per gateway, and the inbox entries that it completes."""

    batches: dict[str, OutboxBatch] = field(default_factory=dict)
    done: list[bytes] = field(default_factory=list)

    def extend(self, later: StepOutput) -> None:
        """Merge a later step's output."""
        for gateway_id, batch in later.batches.items():
            mine = self.batches.setdefault(gateway_id, batch)
            if mine is not batch:
                mine.step = batch.step
                mine.deltas.extend(batch.deltas)
                mine.replies.extend(batch.replies)
        self.done += later.done


class OutboxWriter(threading.Thread):
    """Writes `StepOutput`s in order, each in one script: outputs first, then the acks, and what is
    written by now of each request: the count that the ledger is held against.

    So an inbox entry is gone only when its last output is written. While Redis is away, or out of
    memory, everything waits here. What has come while a script ran goes into the next one together:
    a Redis that answers more slowly than the engine steps would fall behind for ever. Ends with
    `IncarnationReplaced` when another process serves under the replica's id: what a woken sleeper
    still
    has would be other tokens than its successor's.

    Args:
        write_heartbeat: called before an operator's reply is written, so that who reads the reply
            sees its effect in the heartbeat. The engine's thread never waits for Redis.
    """

    def __init__(
        self,
        client: redis.Redis,
        prefix: str,
        replica_id: str,
        incarnation: str,
        write_heartbeat: Callable[[], None],
    ) -> None:
        super().__init__(name="outbox", daemon=True)
        self._prefix = prefix
        self._inbox = redis_keys.inbox_key(replica_id, prefix)
        self._owner = redis_keys.owner_key(replica_id, prefix)
        self._written = redis_keys.written_tokens_key(prefix)
        self._replica_id, self._incarnation = replica_id, incarnation
        self._write_heartbeat = write_heartbeat
        self._script = client.register_script(_WRITE)
        self._queue: queue.SimpleQueue[StepOutput | None] = queue.SimpleQueue()
        self._closing = False
        #: Called before outputs are written.
        self.on_write: Callable[[], None] = lambda: None

    def put(self, output: StepOutput) -> None:
        """Queue a step's output; returns at once."""
        self._queue.put(output)

    def close(self, timeout: float) -> None:
        """Write what is queued, then stop."""
        self._queue.put(None)
        self.join(timeout)

    def run(self) -> None:
        request_short_time_slice()
        while (output := self._next()) is not None:
            if any(batch.replies for batch in output.batches.values()):
                self._write_heartbeat()
            self.on_write()
            while not self._write(output):
                time.sleep(_RETRY_S)

    def _next(self) -> StepOutput | None:
        """All that waits, as one; None at the end."""
        output = None if self._closing else self._queue.get()
        for _ in range(_MAX_STEPS):
            if output is None or self._queue.empty():
                break
            later = self._queue.get()
            if later is None:
                self._closing = True
                break
            output.extend(later)
        return output

    def _write(self, output: StepOutput) -> bool:
        """All of it or nothing; False when Redis couldn't be reached or refused it."""
        outboxes = [redis_keys.outbox_key(name, self._prefix) for name in output.batches]
        batches = [protocol.encode(batch) for batch in output.batches.values()]
        limits = [protocol.OUTBOX_MAXLEN, protocol.OUTBOX_TTL_S]
        written: dict[str, int] = {}
        for batch in output.batches.values():
            written |= protocol.written_token_counts(batch.deltas)
        try:
            written = self._script(
                keys=[self._owner, self._inbox, self._written, *outboxes],
                args=[
                    self._incarnation,
                    protocol.CONSUMER_GROUP,
                    *limits,
                    len(output.done),
                    *batches,
                    *output.done,
                    *[word for pair in written.items() for word in pair],
                ],
            )
        except redis.RedisError as error:
            if not is_temporary(error):
                raise
            log.warning("Outputs can't be written (%s); trying again.", error)
            return False
        if not written:
            raise IncarnationReplaced(self._replica_id)
        return True
