"""Reads a replica's inbox stream in a thread of its own."""

from __future__ import annotations

import logging
import threading
from typing import Any

import msgspec
import redis

from engine.contract import protocol
from engine.contract.protocol import EngineRequest
from engine.contract.redis_link import is_temporary
from engine.contract.time_slice import ask_for_short_turns
from engine.contract.token_lists import untracked
from engine.serving.fence import Fence
from engine.serving.intake import Intake

log = logging.getLogger(__name__)

_BLOCK_MS = 500
_COUNT = 128
_RETRY_S = 0.5


class InboxReader(threading.Thread):
    """Consumer of the group `engine`; puts (entry id, message) into `messages`.

    An entry stays pending until `OutboxWriter` acknowledges it, after the request's last output.
    What stands in the stream is for the process that owns the replica's id; one that was replaced
    while it stood still ends with `FencedOff` before it takes any.
    Entries that a former incarnation left pending are dropped at the start: gateways notice the new
    incarnation and send what they still want, with the tokens they already have.
    """

    def __init__(self, client: redis.Redis, stream: str, consumer: str, fence: Fence) -> None:
        super().__init__(name="inbox", daemon=True)
        self.messages = Intake()
        self._redis = client
        self._stream = stream
        self._consumer = consumer
        self._fence = fence
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Take nothing more from the stream."""
        self._stopping.set()

    def run(self) -> None:
        ask_for_short_turns()
        fresh = True
        while not self._stopping.is_set():
            try:
                self._fence.check()
                if fresh:
                    self._join_group()
                    self._drop_pending()
                    fresh = False
                self._read()
            except redis.RedisError as error:
                if "NOGROUP" in str(error):
                    # Redis came back without our stream.
                    log.warning("The inbox's consumer group is gone; making it anew.")
                    fresh = True
                elif is_temporary(error):
                    log.warning("The inbox can't be read (%s); trying again.", error)
                    self._stopping.wait(_RETRY_S)
                else:
                    raise

    def _join_group(self) -> None:
        try:
            self._redis.xgroup_create(self._stream, protocol.CONSUMER_GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _drop_pending(self) -> None:
        """Delete what a former incarnation had read and not finished."""
        dropped = 0
        while True:
            pending: Any = self._redis.xpending_range(
                self._stream, protocol.CONSUMER_GROUP, "-", "+", 1000
            )
            ids = [
                entry["message_id"] for entry in pending if entry["consumer"] != self._consumer_id
            ]
            if not ids:
                break
            self._redis.xack(self._stream, protocol.CONSUMER_GROUP, *ids)
            self._redis.xdel(self._stream, *ids)
            dropped += len(ids)
        if dropped:
            log.warning("Dropped %d inbox entries of a former incarnation.", dropped)

    @property
    def _consumer_id(self) -> bytes:
        return self._consumer.encode()

    def _read(self) -> None:
        found: Any = self._redis.xreadgroup(
            protocol.CONSUMER_GROUP,
            self._consumer,
            {self._stream: ">"},
            count=_COUNT,
            block=_BLOCK_MS,
        )
        for _, entries in found or []:
            for entry_id, fields in entries:
                self._take(entry_id, fields)

    def _take(self, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        try:
            message = protocol.decode_inbox(fields.get(protocol.FIELD, b""))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            # Whoever wrote it can't be told; keeping it would only make it come again.
            log.error("Inbox entry %s isn't a message (%s); deleted.", entry_id.decode(), error)
            self._redis.xack(self._stream, protocol.CONSUMER_GROUP, entry_id)
            self._redis.xdel(self._stream, entry_id)
            return
        if isinstance(message, EngineRequest):
            untracked(message.prompt_token_ids)
        self.messages.put((entry_id, message))
