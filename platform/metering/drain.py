"""Moving usage records from the spool into the ledger, in a thread of every gateway process.

The drainers share a consumer group. An entry is acknowledged and deleted only after its row is
written, and request ids are unique in the ledger, so nothing is lost or counted twice whenever a
drainer dies. Entries of a dead drainer are claimed by another after `CLAIM_AFTER_MS`; after a
broken connection a drainer first writes the entries that it had already read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import redis
from django.db import DatabaseError, InterfaceError, close_old_connections
from redis.exceptions import ResponseError

from common.db import ROW_ERRORS
from common.loops import LoopThread
from metering.ledger import insert_records
from metering.redis_scripts import redis_key, sync_client
from metering.settlement import pop_buffered, requeue, spool_key
from metering.usage_record import UsageRecord, decode_record

logger = logging.getLogger(__name__)

GROUP = "ledger"
BATCH = 500
BLOCK_MS = 1000
#: Wait after the first record for more, to write all in one transaction: at a few requests a
#: second, one transaction each took half of a gateway's CPU time.
GATHER_S = 0.5
CLAIM_AFTER_MS = 30_000
GONE_AFTER_MS = 3_600_000
MAX_PAUSE_S = 30.0
#: Entries that can't be decoded are moved here for a person to look at.
DEAD_LETTERS_MAX = 10_000

Entries = list[tuple[bytes, dict[bytes, bytes] | None]]


class PendingAge:
    """How long consumers have held entries, by this process's own clock.

    After Redis's clock was set back, its idle times stay near 0 until it has caught up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[tuple[bytes, bytes, int], float] = {}

    def idle_ms(self, pending: Sequence[Mapping[str, Any]]) -> dict[bytes, float]:
        """Idle time by entry id; forgets the entries that are no longer pending."""
        now = self._clock()
        keys = {
            one["message_id"]: (one["message_id"], one["consumer"], one["times_delivered"])
            for one in pending
        }
        self._since = {key: self._since.get(key, now) for key in keys.values()}
        return {name: (now - self._since[key]) * 1000 for name, key in keys.items()}


class Spool:
    """The stream, as one consumer of its group sees it."""

    def __init__(self, client: redis.Redis, consumer: str = "") -> None:
        self.client, self.key = client, spool_key()
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def ensure_group(self) -> None:
        """Create the stream and the group if missing."""
        try:
            self.client.xgroup_create(self.key, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def read(self, *, block_ms: int | None) -> Entries:
        """New entries; `block_ms` None returns at once."""
        reply = self.client.xreadgroup(
            GROUP, self.consumer, {self.key: ">"}, count=BATCH, block=block_ms
        )
        return _entries(reply)

    def pending_entries(self) -> Entries:
        """Entries that this consumer read but hasn't acknowledged; trimmed ones have no fields."""
        return _entries(self.client.xreadgroup(GROUP, self.consumer, {self.key: "0"}, count=BATCH))

    def claim(self, idle_ms: int, watch: PendingAge | None = None) -> Entries:
        """Claim the entries of dead consumers, by Redis's clock or by `PendingAge`."""
        pending: list[dict[str, Any]]
        pending = list(self.client.xpending_range(self.key, GROUP, "-", "+", BATCH))
        foreign = [entry for entry in pending if entry["consumer"].decode() != self.consumer]
        watched = watch.idle_ms(foreign) if watch is not None else {}
        idle = [
            entry["message_id"]
            for entry in foreign
            if max(entry["time_since_delivered"], watched.get(entry["message_id"], 0)) >= idle_ms
        ]
        # XCLAIM doesn't check idleness again, which is safe: duplicates don't reach the ledger.
        return self._read_entries(idle) if idle else []

    def _read_entries(self, ids: list[bytes]) -> Entries:
        reply = self.client.xclaim(self.key, GROUP, self.consumer, 0, list(ids))
        entries: Entries = [entry for entry in cast("Entries", reply) if entry[1]]
        if trimmed := set(ids) - {name for name, _ in entries}:
            self.done(list(trimmed))
        return entries

    def done(self, ids: Sequence[bytes]) -> None:
        """Acknowledge and delete."""
        pipe = self.client.pipeline(transaction=True)
        pipe.xack(self.key, GROUP, *ids)
        pipe.xdel(self.key, *ids)
        pipe.execute()

    def dead_letter(self, entry_id: bytes, fields: dict[bytes, bytes] | None, reason: str) -> None:
        """Move an entry that can't be decoded to the dead letters."""
        logger.error("usage spool entry %s moved to dead letters: %s", entry_id.decode(), reason)
        data: dict[Any, Any] = {**(fields or {}), b"reason": reason}
        self.client.xadd(redis_key("usage:dead"), data, maxlen=DEAD_LETTERS_MAX, approximate=True)
        self.done([entry_id])

    def claim_abandoned(self) -> None:
        """Delete consumers that died long ago and have nothing pending."""
        for consumer in self.client.xinfo_consumers(self.key, GROUP):
            if consumer["idle"] > GONE_AFTER_MS and not consumer["pending"]:
                self.client.xgroup_delconsumer(self.key, GROUP, consumer["name"])

    def remove_consumer(self) -> None:
        """Delete this consumer, unless it has pending entries for others to claim."""
        pending = self.client.xpending_range(
            self.key, GROUP, "-", "+", 1, consumername=self.consumer
        )
        if not pending:
            self.client.xgroup_delconsumer(self.key, GROUP, self.consumer)


def write(spool: Spool, entries: Entries) -> int:
    """Write entries into the ledger and remove them from the spool; returns how many.

    Entries that can't be decoded or stored go to the dead letters. Raises
    DatabaseError, RedisError.
    """
    records: list[UsageRecord] = []
    ids: list[bytes] = []
    for entry_id, fields in entries:
        if not fields:  # trimmed from the stream while pending
            spool.done([entry_id])
            continue
        try:
            records.append(decode_record(fields[b"r"]))
            ids.append(entry_id)
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError) as error:
            spool.dead_letter(entry_id, fields, repr(error))
    if not ids:
        return 0
    try:
        insert_records(records)
    except ROW_ERRORS as error:
        if len(ids) == 1:
            spool.dead_letter(ids[0], dict(entries)[ids[0]], repr(error))
            return 0
        # One at a time, so that one bad record doesn't block the others.
        return sum(write(spool, [entry]) for entry in entries if entry[0] in set(ids))
    spool.done(ids)
    return len(ids)


def drain_once(client: redis.Redis, *, claim_idle_ms: int = CLAIM_AFTER_MS) -> int:
    """Drain the spool's current entries and return how many records were written."""
    spool = Spool(client)
    spool.ensure_group()
    written = write_waiting()
    while entries := spool.claim(claim_idle_ms):
        written += write(spool, entries)
    while entries := spool.read(block_ms=None):
        written += write(spool, entries)
    spool.remove_consumer()
    return written


def write_waiting() -> int:
    """Write the records that wait in this process because Redis was down. Raises DatabaseError."""
    records = pop_buffered()
    try:
        if records:
            insert_records(records)
    except BaseException:
        requeue(records)
        raise
    return len(records)


class LedgerWriter(LoopThread):
    """Drains until stopped; backs off while the database or Redis is down.

    Its thread keeps its database connection open between batches: opening SQLite for each batch
    took 14 % of a gateway's CPU time at eight streams.
    """

    def __init__(self, *, claim_idle_ms: int = CLAIM_AFTER_MS) -> None:
        super().__init__("quire-usage")
        self._claim_idle_ms = claim_idle_ms
        #: Its name in the group: entries that it has read stay assigned to it after an error.
        self._consumer = ""
        self._watch = PendingAge()

    def loop(self) -> None:
        pause = 0.0
        while not self.stopping.wait(pause):
            client = sync_client(block_s=BLOCK_MS / 1000)
            spool = Spool(client, self._consumer)
            self._consumer = spool.consumer
            try:
                self._drain(spool)
            except (DatabaseError, InterfaceError, redis.RedisError, OSError) as error:
                pause = min(MAX_PAUSE_S, max(0.5, pause * 2))
                logger.warning("usage waits in the spool, next try in %.1f s: %s", pause, error)
            else:
                pause = 0.0
            finally:
                client.close()
                close_old_connections()

    def _drain(self, spool: Spool) -> None:
        """Run until an error or a stop request."""
        spool.ensure_group()
        while not self.stopping.is_set() and (mine := spool.pending_entries()):
            self._write(spool, mine)
        rounds = 0
        while not self.stopping.is_set():
            write_waiting()
            if rounds % 10 == 0:
                if claimed := spool.claim(self._claim_idle_ms, self._watch):
                    write(spool, claimed)
                spool.claim_abandoned()
            rounds += 1
            entries = spool.read(block_ms=BLOCK_MS)
            if entries:
                if len(entries) < BATCH and not self.stopping.wait(GATHER_S):
                    entries += spool.read(block_ms=None)
                self._write(spool, entries)
        spool.remove_consumer()

    def _write(self, spool: Spool, entries: Entries) -> None:
        """Write a batch; retry on failure, as these entries are assigned to this consumer."""
        pause = 0.5
        while True:
            try:
                write(spool, entries)
                return
            except (DatabaseError, InterfaceError) as error:
                logger.warning("usage waits in the spool, next try in %.1f s: %s", pause, error)
                close_old_connections()
                if self.stopping.wait(pause):
                    return  # another drainer claims them
                pause = min(MAX_PAUSE_S, pause * 2)


_drainer: LedgerWriter | None = None


def start_drainer() -> None:
    """Start this process's drainer, unless it is running."""
    global _drainer
    if _drainer is None or not _drainer.is_alive():
        _drainer = LedgerWriter()
        _drainer.start()


async def stop_drainer() -> None:
    """Stop this process's drainer without blocking the loop."""
    global _drainer
    if _drainer is not None:
        await asyncio.to_thread(_drainer.stop)
        _drainer = None


def _entries(reply: Any) -> Entries:
    """The entries of the only stream in an XREADGROUP reply, in RESP2's or RESP3's shape."""
    if not reply:
        return []
    if isinstance(reply, dict):
        (value,) = reply.values()
        # redis-py wraps RESP3's entries in one more list
        return list(value[0]) if value and isinstance(value[0], list) else list(value)
    return [entry for _, entries in reply for entry in entries]
