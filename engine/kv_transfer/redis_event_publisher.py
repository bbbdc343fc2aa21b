"""`RedisEventPublisher`: KV events in a Redis stream."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time

import msgspec
import redis

from engine.contract.errors import ConfigError
from engine.contract.kv_events_config import KVEventsConfig
from engine.kv_cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from engine.system.redis_client import replica_client

log = logging.getLogger(__name__)

#: A Redis that takes longer to answer loses a batch.
_TIMEOUT_S = 1.0
#: How long batches may still be written when the publisher is closed.
_CLOSE_TIMEOUT_S = 2.0


class RedisEventPublisher:
    """Adds batches of events to a stream, `topic`, which keeps about `buffer_steps` of them.

    An entry has the fields `source`, host and process as in `Heartbeat`, `number`, which counts
    from 0 for each and has a gap where a batch was lost, and `batch`, as of `ZmqEventPublisher`.

    A thread of its own writes; no step waits for Redis. One thread calls everything.

    Attributes:
        num_lost: number of batches that weren't written.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises `ConfigError` for an endpoint that is no URL of a Redis."""
        try:
            self._redis = replica_client(config.endpoint, timeout_s=_TIMEOUT_S)
        except ValueError as error:
            raise ConfigError(
                f"kv_events_config: endpoint is no URL of a Redis: {error}",
                param="kv_events_config",
            ) from error
        self._stream, self._max_batches = config.topic, config.buffer_steps
        self._source = f"{socket.gethostname()}:{os.getpid()}"
        self._encoder = msgspec.msgpack.Encoder()
        self._next_number = self.num_lost = 0
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(config.max_queue_size)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """Write a batch soon; [] is none."""
        if not events:
            return
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            batch = self._encoder.encode(KVEventBatch(time.time(), events))
            self._queue.put_nowait((number, batch))
        except queue.Full:
            self._count_lost("more than max_queue_size batches wait")

    def close(self) -> None:
        """Write what waits, and end the thread."""
        try:
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            log.warning("KV events are lost: they weren't written in time.")
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._redis.close()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            number, batch = entry
            try:
                self._redis.xadd(
                    self._stream,
                    {"source": self._source, "number": number, "batch": batch},
                    maxlen=self._max_batches,
                    approximate=True,
                )
            except (redis.RedisError, OSError) as error:
                self._count_lost(str(error))

    def _count_lost(self, reason: str) -> None:
        if not self.num_lost:
            log.warning("KV events are lost: %s.", reason)
        self.num_lost += 1
