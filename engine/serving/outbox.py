"""Writes steps' outputs to gateways' streams, in a separate thread."""

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
#: Maximum number of steps whose outputs are written together.
_MAX_STEPS = 256
#: KEYS: the owner, the inbox, the token counts of open requests, an outbox per batch.
#: ARGV: incarnation, the consumer group, maximum length of an outbox, its expiry, number of
#: completed inbox entries, the batches in the order of their outboxes, these inbox entries, and the
#: token counts: fields and values.
#: A live gateway keeps renewing its stream's expiry. A stream without one has just been recreated:
#: its gateway died and the stream expired, so it is given an expiry, as nothing else would remove
#: it.
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
    """Output of a step: one batch per gateway, and the inbox entries that are completed by it."""

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
    """Writes `StepOutput`s in order, each in one script: first the outputs, then the acks and the
    number of tokens written of each request, which the ledger is checked against.

    So an inbox entry is removed only when its last output has been written. While Redis is away or
    out of memory, everything waits here. Outputs that arrive while a script runs are merged into
    the next one; otherwise a Redis slower than the engine's steps would fall behind forever.
    Stops with `IncarnationReplaced` when another process serves under the replica id: the tokens of
    a process that resumes after being replaced could differ from its successor's.

    Args:
        write_heartbeat: called before an operator's reply is written, so that the heartbeat shows
            the command's effect to whoever reads the reply. The engine's thread never waits for
            Redis.
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
        """All queued outputs, merged into one; None: stop."""
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
        """Write all of it or nothing; False if Redis couldn't be reached or refused it."""
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
