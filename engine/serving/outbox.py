"""Writes steps' outputs to gateways' streams, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass, field

import redis

from engine.contract import protocol
from engine.contract.protocol import OutboxBatch
from engine.contract.redis_link import is_temporary

log = logging.getLogger(__name__)

_RETRY_S = 0.5


@dataclass(slots=True)
class StepOutput:
    """What one step writes: a batch a gateway, and the inbox entries that it completes."""

    batches: dict[str, OutboxBatch] = field(default_factory=dict)
    done: list[bytes] = field(default_factory=list)


class OutboxWriter(threading.Thread):
    """Writes `StepOutput`s in order, each in one transaction: outputs first, then the acks.

    So an inbox entry is gone only when its last output is written. While Redis is away, or out of
    memory, everything waits here.
    """

    def __init__(self, client: redis.Redis, prefix: str, inbox: str) -> None:
        super().__init__(name="outbox", daemon=True)
        self._redis = client
        self._prefix = prefix
        self._inbox = inbox
        self._queue: queue.SimpleQueue[StepOutput | None] = queue.SimpleQueue()

    def put(self, output: StepOutput) -> None:
        """Queue a step's output; returns at once."""
        self._queue.put(output)

    def close(self, timeout: float) -> None:
        """Write what is queued, then end."""
        self._queue.put(None)
        self.join(timeout)

    def run(self) -> None:
        while (output := self._queue.get()) is not None:
            while not self._write(output):
                time.sleep(_RETRY_S)

    def _write(self, output: StepOutput) -> bool:
        """One transaction; False when Redis couldn't be reached or refused it whole."""
        pipe = self._redis.pipeline(transaction=True)
        for gateway_id, batch in output.batches.items():
            stream = protocol.outbox_key(gateway_id, self._prefix)
            pipe.xadd(
                stream,
                {protocol.FIELD: protocol.encode(batch)},
                maxlen=protocol.OUTBOX_MAXLEN,
                approximate=True,
            )
            # A live gateway keeps renewing its stream's expiry. Where there is none, the stream has
            # just been made anew: its gateway died and it expired, and nobody else would remove it.
            pipe.expire(stream, protocol.OUTBOX_TTL_S, nx=True)
        if output.done:
            pipe.xack(self._inbox, protocol.CONSUMER_GROUP, *output.done)
            pipe.xdel(self._inbox, *output.done)
        try:
            pipe.execute(raise_on_error=False)
        except redis.RedisError as error:
            if not is_temporary(error):
                raise
            log.warning("Outputs can't be written (%s); trying again.", error)
            return False
        return True
