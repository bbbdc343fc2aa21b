"""Reads this gateway's outbox, and trims the entries that were delivered: two tasks a process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from redis.exceptions import RedisError

from common.log_context import bound_request, request_fields
from engine.contract import redis_keys
from engine.contract.messages import (
    OUTBOX_TTL_S,
    STREAM_FIELD,
    AbortRequest,
    OutboxBatch,
    decode_outbox,
    encode,
)
from engine.system.redis_client import TIMEOUT_S, RedisPipeline
from inference.loop.fair_dispatch import iterate_cooperatively

logger = logging.getLogger(__name__)

OnError = Callable[[RedisError], None]
CLOSE_TIMEOUT_S = 1.0


class InboxWriter:
    """Appends messages to inbox streams, in the order they are posted."""

    def __init__(self, link: RedisPipeline, prefix: str) -> None:
        self._link, self._prefix = link, prefix
        self._sent: set[asyncio.Future[Any]] = set()

    def post(self, replica_id: str, message: msgspec.Struct, on_error: OnError) -> None:
        """Send without waiting. `on_error`: Redis failed, though it may have stored the message."""
        key = redis_keys.inbox_key(replica_id, self._prefix)
        reply = self._link.send("XADD", key, "*", STREAM_FIELD, encode(message))
        self._sent.add(reply)
        reply.add_done_callback(lambda done: self._answered(done, on_error))

    def _answered(self, reply: asyncio.Future[Any], on_error: OnError) -> None:
        self._sent.discard(reply)
        error = None if reply.cancelled() else reply.exception()
        if isinstance(error, RedisError):
            on_error(error)

    def abort(self, replica_id: str, engine_id: str, index: int | None, reason: str) -> None:
        """Abort a request at a replica. If sending fails, the engine finishes it for no reader."""

        fields = request_fields()  # the reply arrives in another task

        def on_error(error: RedisError) -> None:
            with bound_request(**fields):
                logger.warning("The abort of %s could not be sent: %s", engine_id, error)

        message = AbortRequest(request_id=engine_id, index=index, finish_reason=reason)
        self.post(replica_id, message, on_error)

    async def close(self) -> None:
        """Wait up to `CLOSE_TIMEOUT_S` until Redis has stored the posted messages."""
        if self._sent:
            await asyncio.wait(set(self._sent), timeout=CLOSE_TIMEOUT_S)


#: Seconds within which a finished request is settled.
FORGET_ENDED_S = 15.0
#: A request without deltas for so many seconds was aborted.
FORGET_SILENT_S = 600.0

_SAVE = """
redis.call('DEL', KEYS[1])
if #ARGV > 2 then redis.call('HSET', KEYS[1], unpack(ARGV, 3)) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('XTRIM', KEYS[2], 'MINID', '=', ARGV[1])
"""


class Progress:
    """Output tokens by request and output, also stored in Redis.

    Delivered entries are trimmed from the outbox. If this process is killed, another one bills its
    requests from these counts and from what is left in the outbox.
    """

    def __init__(self, gateway_id: str, prefix: str) -> None:
        self._keys = (
            redis_keys.progress_key(gateway_id, prefix),
            redis_keys.outbox_key(gateway_id, prefix),
        )
        #: "request/output" -> number of tokens, and when (monotonic) it may be forgotten.
        self._counts: dict[str, tuple[int, float]] = {}

    def record_batch(self, batch: OutboxBatch) -> None:
        """Count the tokens of a batch."""
        now = time.monotonic()
        for delta in batch.deltas:
            name = f"{redis_keys.base_request_id(delta.request_id)}/{delta.index}"
            so_far = delta.start + len(delta.token_ids)
            previous = self._counts.get(name)
            if previous is not None:
                so_far = max(so_far, previous[0])
            keep = FORGET_ENDED_S if delta.finish_reason else FORGET_SILENT_S
            self._counts[name] = (so_far, now + keep)

    async def save_and_trim(self, link: RedisPipeline, min_id: str) -> None:
        """Write the counts and trim the outbox before `min_id`, atomically."""
        now = time.monotonic()
        self._counts = {name: entry for name, entry in self._counts.items() if entry[1] > now}
        values = [word for name, (count, _) in self._counts.items() for word in (name, count)]
        # Lua's `unpack` takes at most a few thousand values: further requests are left out.
        await link.execute("EVAL", _SAVE, 2, *self._keys, min_id, OUTBOX_TTL_S, *values[-6000:])


READ_COUNT = 256
#: Entries that are decoded as they arrive; the rest wait for the loop's next iterations.
MAX_SCANNED = 2
BLOCK_MS = 5_000
TRIM_EVERY_S = 0.5
#: Seconds after which an outbox expires unless it is refreshed.
EXPIRE_S = OUTBOX_TTL_S
RETRY_S = 0.2
PROBE_EXPIRE_S = 60


#: An entry's id, and its undecoded bytes or its decoded batch.
EntryBuffer = tuple[bytes, bytes | None, OutboxBatch | None]


class OutboxReader:
    """Reads `OutboxBatch`es and passes them to `deliver`, in order, each entry once.

    `run` and `trim_forever` run concurrently.

    Args:
        reading: a dedicated link, whose timeout allows for blocking reads.
        link: for short commands.
        begin: called with each of the first `MAX_SCANNED` batches as it arrives; removes what
            can't wait for the loop's next iteration from it, and must be short.
        deliver: called on the loop with each batch; must not block.
        save: stores elsewhere what `deliver` received; awaited before that is removed here.
        on_error: called when Redis could not be read.
        restore: writes again what Redis may have lost; awaited before reading after an error.
    """

    def __init__(
        self,
        reading: RedisPipeline,
        link: RedisPipeline,
        gateway_id: str,
        prefix: str,
        begin: Callable[[OutboxBatch], None],
        deliver: Callable[[OutboxBatch], Awaitable[None]],
        save: Callable[[], Awaitable[None]],
        on_error: Callable[[], None],
        restore: Callable[[], Awaitable[None]],
    ) -> None:
        self._reading, self._link = reading, link
        self._begin, self._deliver = begin, deliver
        self._save, self._on_error, self._restore = save, on_error, restore
        self.key = redis_keys.outbox_key(gateway_id, prefix)
        self._progress = Progress(gateway_id, prefix)
        self._command = ("XREAD", "COUNT", READ_COUNT, "BLOCK", BLOCK_MS, "STREAMS", self.key)
        self._last = self._handed_out = b"0-0"
        self._has_news = asyncio.Event()

    async def run(self) -> None:
        """Read forever; reconnects to Redis when the connection is lost."""
        has_failed = False
        while True:
            try:
                if has_failed:
                    await self._restore()
                    has_failed = False
                await self._read()
            except RedisError as error:
                has_failed = True
                logger.warning("outbox read failed, retrying: %s", error)
                self._on_error()
                await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        arrived: list[EntryBuffer] = []
        reply = self._reading.send(
            *self._command, self._last, hear=partial(self._decode_entries, arrived)
        )
        self._reading.flush()
        await reply
        async for entry_id, data, batch in iterate_cooperatively(arrived):
            self._last = entry_id
            if (decoded := batch or self._read_of(data)) is not None:
                await self._hand_out(decoded)
            self._handed_out = entry_id
            self._has_news.set()

    def _decode_entries(self, arrived: list[EntryBuffer], entries: Any) -> None:
        """Buffer the entries that Redis sent, and pass the first of them to `begin`."""
        # [[stream, [[id, [field, value, ...]], ...]]]; None when nothing arrived.
        for entry_id, fields in entries[0][1] if entries else ():
            is_batch = fields and len(fields) > 1 and fields[0] == STREAM_FIELD
            data, batch = fields[1] if is_batch else None, None
            if len(arrived) < MAX_SCANNED:
                data, batch = None, self._read_of(data)
                if batch is not None:
                    self._dispatch_safely(batch)
            arrived.append((entry_id, data, batch))

    def _read_of(self, data: bytes | None) -> OutboxBatch | None:
        """Decode a batch and mark it as read; None for an invalid entry."""
        if data is None:
            return None
        try:
            batch = decode_outbox(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            # The gap that this leaves is detected by the tokens' positions and repaired.
            logger.error("An outbox entry can't be read: %s", error)
            return None
        self._progress.record_batch(batch)
        return batch

    def _dispatch_safely(self, batch: OutboxBatch) -> None:
        try:
            self._begin(batch)
        except Exception:  # one bad batch must not end every stream of this process
            logger.exception("A batch of replica %s could not be begun.", batch.replica_id)

    async def _hand_out(self, batch: OutboxBatch) -> None:
        try:
            await self._deliver(batch)
        except Exception:  # as above
            logger.exception("A batch of replica %s could not be handed out.", batch.replica_id)

    async def trim_forever(self) -> None:
        """Forever: have delivered entries stored elsewhere, then remove them from the outbox.

        Runs concurrently with the reading, so that no token waits for it.
        """
        while True:
            await self._has_news.wait()
            await asyncio.sleep(TRIM_EVERY_S)
            self._has_news.clear()
            try:
                await self._trim()
            except RedisError as error:
                logger.warning("The outbox can't be trimmed: %s. Trying again.", error)
                self._on_error()
                self._has_news.set()

    async def _trim(self) -> None:
        last = self._handed_out
        await self._save()
        await self._progress.save_and_trim(self._link, _next_id(last))

    def restart(self) -> None:
        """Read from the beginning: Redis lost the stream, and all of its entries are new."""
        self._last = self._handed_out = b"0-0"

    async def refresh_ttl(self) -> None:
        """Create the stream if it is missing, and renew its expiry."""
        if not await self._link.execute("EXPIRE", self.key, EXPIRE_S):
            # An empty entry creates the stream; the reader skips it.
            empty = encode(OutboxBatch(replica_id="", incarnation="", step=0))
            await self._link.execute("XADD", self.key, "*", STREAM_FIELD, empty)
            await self._link.execute("EXPIRE", self.key, EXPIRE_S)

    async def write_probe(self) -> None:
        """Write a key that expires by itself. Raises `redis.RedisError` if Redis can't write."""
        await self._link.execute("SET", f"{self.key}:probe", b"", "EX", PROBE_EXPIRE_S)

    async def delete(self) -> None:
        """Remove the stream."""
        await self._link.execute("DEL", self.key)


def _next_id(entry_id: bytes) -> str:
    """The smallest stream id after this one."""
    milliseconds, _, sequence = entry_id.partition(b"-")
    return f"{int(milliseconds)}-{int(sequence) + 1}"


def short_link(url: str) -> RedisPipeline:
    """A link for requests and replies."""
    return RedisPipeline(url, timeout_s=TIMEOUT_S)


def reading_link(url: str) -> RedisPipeline:
    """A link for blocking reads, which would hold up any other command."""
    return RedisPipeline(url, timeout_s=TIMEOUT_S + BLOCK_MS / 1000)
