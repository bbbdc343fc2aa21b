"""`ZmqEventPublisher`: KV events by ZeroMQ, as vLLM publishes them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import msgspec
import zmq

from engine.contract.errors import ConfigError
from engine.contract.kv_events_config import KVEventsConfig
from engine.kv_cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

log = logging.getLogger(__name__)

#: The number of the message after the last that can be asked for.
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
#: How long messages may still be sent when the publisher is closed.
_LINGER_MS = 1000


class ZmqEventPublisher:
    """Publishes batches of events, and past ones to those who ask for them.

    A message is [topic, number, batch]: the number of 8 bytes, big-endian, counts from 0. It has a
    gap where a batch was lost. Who sends the number of a batch from a REQ or DEALER socket to the
    replay endpoint gets [number, batch] of all from there on, and at the end the number -1.

    A thread of its own sends; no step waits for a subscriber. One thread calls everything.

    Attributes:
        num_lost: number of batches for which the thread's queue was full.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        """An endpoint with `*` or `::`, or of `ipc://`, is bound, another connected, as by vLLM.

        Raises `ConfigError` for one that can't be.
        """
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._next_number = self.num_lost = 0
        self._context = zmq.Context()
        self._queue = self._context.socket(zmq.PUSH)
        self._queue.sndhwm, self._queue.sndtimeo = config.max_queue_size, _LINGER_MS
        self._batches = self._context.socket(zmq.PULL)
        self._batches.rcvhwm = 1
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.sndhwm, self._publisher.linger = config.hwm, _LINGER_MS
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._batches.bind("inproc://batches")
            self._queue.connect("inproc://batches")
            is_bound = config.endpoint.startswith("ipc://") or any(
                wildcard in config.endpoint for wildcard in ("*", "::")
            )
            (self._publisher.bind if is_bound else self._publisher.connect)(config.endpoint)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.linger = 0
                # A whole answer waits for a subscriber that reads slowly; what is over is dropped.
                self._replay.sndhwm = config.buffer_steps + 1
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_events_config: an endpoint can't be used: {error}.", param="kv_events_config"
            ) from error
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """Send a batch soon; [] is none."""
        if not events:
            return
        number, self._next_number = self._next_number.to_bytes(8, "big"), self._next_number + 1
        batch = self._encoder.encode(KVEventBatch(time.time(), events))
        try:
            self._queue.send_multipart([number, batch], zmq.NOBLOCK)
        except zmq.Again:
            if not self.num_lost:
                log.warning("KV events are lost: more than max_queue_size batches wait.")
            self.num_lost += 1

    def close(self) -> None:
        """Send what waits, and end the thread."""
        try:
            self._queue.send(b"")
        except zmq.Again:
            log.warning("KV events are lost: they weren't sent in time.")
        self._thread.join(2 * _LINGER_MS / 1000)
        self._context.destroy(linger=_LINGER_MS)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._batches, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._batches in ready:
                    frames = self._batches.recv_multipart()
                    if len(frames) == 1:
                        return
                    number, batch = frames
                    self._buffer.append((number, batch))
                    self._publisher.send_multipart([self._topic, number, batch])
                if self._replay is not None and self._replay in ready:
                    self._answer_replay(self._replay)
        except zmq.ZMQError:
            log.exception("KV events aren't published any more")

    def _answer_replay(self, replay: zmq.Socket[bytes]) -> None:
        """Send the past batches that a subscriber asks for."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != len(_END_OF_REPLAY):
            log.warning("A request for past KV events isn't a number of 8 bytes")
            return
        client, delimiter, start = frames
        for number, batch in self._buffer:
            if number >= start:
                replay.send_multipart([client, delimiter, number, batch])
        replay.send_multipart([client, delimiter, _END_OF_REPLAY, b""])
