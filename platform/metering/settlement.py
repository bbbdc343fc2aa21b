"""Settling a request: its usage goes to the spool, unused reservations are released."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from typing import Any, TypeVar, cast

import msgspec
from django.conf import settings
from django.db import DatabaseError, InterfaceError
from redis.exceptions import RedisError

from common.db import run_in_db_thread
from engine.contract import redis_keys
from engine.contract.redis_keys import written_tokens_key
from metering.admission import UNLIMITED, Admission, takeover_key
from metering.ledger import insert_records
from metering.open_requests import GATEWAY, open_key, reservation_key
from metering.redis_scripts import redis_key, redis_link, run_script
from metering.usage_record import UsageRecord, encode_record

# Replicas count the tokens that they write for each open request, in the script that writes them.
# The script that settles the request closes that count and adds it to sums by day, tenant and
# model: tokens written, and how many of them the rules exempt from billing. A killed process leaves
# both or neither, so the ledger must equal the difference of the two.

#: Kinds of sums, for prompts and for outputs.
SUMS = ("prompt", "unbilled_prompt", "output", "unbilled_output")


def sums_key() -> str:
    """Redis key of the hash of sums: `usage_field` -> tokens."""
    return redis_key("accounts")


def reconciliation_start_key() -> str:
    """Redis key of the time since which the sums are complete."""
    return redis_key("accounts:since")


def usage_field(day: str, tenant_id: int, model: str, what: str) -> str:
    """A field of `sums_key`."""
    return f"{day} {tenant_id} {what} {model}"


def parse_usage_field(name: str) -> tuple[str, int, str, str]:
    """Parse a field of `sums_key` into (day, tenant, kind, model)."""
    day, tenant_id, what, model = name.split(" ", 3)
    return day, int(tenant_id), what, model


@dataclass(frozen=True)
class EngineUsage:
    """The engine requests that a record covers.

    Attributes:
        names: the engine's ids. outputs: number of outputs of each.
        is_complete: every output was ended by the engine, so all of it is billed. Otherwise less
            may be: a stop string matched, the client disconnected, or no one resumed the stream.
        billed_prompt, billed_output: tokens that were already settled under another id.
    """

    names: Sequence[str]
    outputs: int = 1
    is_complete: bool = False
    billed_prompt: int = 0
    billed_output: int = 0

    def encode(self, record: UsageRecord) -> bytes:
        """JSON in the form that `settle.lua` reads."""
        started_at = cast(datetime, record.started_at).astimezone(UTC)
        day = f"{started_at:%Y-%m-%d}"
        fields = [
            redis_keys.output_field(n, i) for n, i in product(self.names, range(self.outputs))
        ]
        return msgspec.json.encode(
            {
                "prompts": [redis_keys.prompt_field(name) for name in self.names],
                "outputs": fields,
                "whole": self.is_complete,
                "prompt": record.prompt_tokens,
                "output": record.completion_tokens,
                "before": [self.billed_prompt, self.billed_output],
                "started": started_at.timestamp(),
                "sums": [usage_field(day, record.tenant_id, record.model, what) for what in SUMS],
            }
        )


logger = logging.getLogger(__name__)

Unsettled = tuple[UsageRecord, EngineUsage | None]
T = TypeVar("T")
#: Above this many outputs, building the arguments would block the event loop for too long.
_INLINE_MAX_OUTPUTS = 64
#: Maximum number of records held in this process while both Redis and the database are down.
MAX_WAITING = 10_000
#: Maximum usage records buffered in Redis while the database is unreachable.
MAX_SPOOLED = 1_000_000
_waiting: deque[UsageRecord] = deque()
#: Records that are in the ledger, but whose reservations are still to be released in Redis.
_unsettled: deque[Unsettled] = deque(maxlen=MAX_WAITING)


def spool_key() -> str:
    """Redis key of the stream of records on their way into the ledger."""
    return redis_key("usage")


def settle_keys(request_id: str, gateway: str = GATEWAY) -> list[str]:
    """Keys of `settle.lua`."""
    return [
        reservation_key(request_id),
        spool_key(),
        open_key(gateway),
        takeover_key(request_id),
        written_tokens_key(settings.QUIRE.key_prefix),
        sums_key(),
        reconciliation_start_key(),
    ]


def settle_arguments(
    record: UsageRecord,
    entry: bytes,
    epochs: Mapping[str, str],
    gateway: str = GATEWAY,
    account: EngineUsage | None = None,
) -> list[Any]:
    """Arguments of `settle.lua`."""
    epochs_json = msgspec.json.encode(dict(epochs))
    usage = account.encode(record) if account is not None else b""
    numbers = [record.total_tokens, entry, MAX_SPOOLED, record.request_id, record.cost_nanos]
    return [*numbers, epochs_json, gateway, usage]


async def settle(
    record: UsageRecord, admission: Admission | None = None, account: EngineUsage | None = None
) -> None:
    """Record a request's usage exactly once by its request id, however often this is called.

    `admission`: its admission, whose reservations are corrected to the actual usage; None if it is
    unknown whether the request has any. `account`: the engine requests whose counts this closes.

    Takes one round trip to Redis. Without Redis the record goes straight to the database, and
    without that too it waits in this process, at most `MAX_WAITING` of them. Nothing is raised: the
    client has its answer, and records that are lost are logged.
    """
    admission = admission or RESERVED_ADMISSION
    entry = encode_record(record)
    try:
        if admission.reserved:
            keys = settle_keys(record.request_id)
            arguments = await _arguments(record, entry, admission.epochs, account)
            await run_script(redis_link(), "settle", keys, arguments)
        else:
            await redis_link().execute(
                "XADD", spool_key(), "MAXLEN", "~", MAX_SPOOLED, "*", "r", entry
            )
    except (RedisError, OSError) as error:
        logger.warning("usage of %s written directly to the database: %s", record.request_id, error)
        if admission.reserved:
            _unsettled.append((record, account))
        await _buffer_in_memory(record)


async def _arguments(
    record: UsageRecord, entry: bytes, epochs: Mapping[str, str], account: EngineUsage | None
) -> list[Any]:
    """Build the arguments off the event loop, since a request may have thousands of outputs."""
    if account is None or len(account.names) * account.outputs <= _INLINE_MAX_OUTPUTS:
        return settle_arguments(record, entry, epochs, account=account)
    return await asyncio.to_thread(settle_arguments, record, entry, epochs, account=account)


RESERVED_ADMISSION = Admission(**{**UNLIMITED.__dict__, "reserved": True})


async def _buffer_in_memory(record: UsageRecord) -> None:
    try:
        await run_in_db_thread(insert_records, [record])
    except (DatabaseError, InterfaceError) as error:
        if len(_waiting) >= MAX_WAITING:
            logger.error("usage lost, Redis and database unreachable: %r", _waiting.popleft())
        _waiting.append(record)
        logger.error("usage of %s buffered in memory: %s", record.request_id, error)


def pop_buffered() -> list[UsageRecord]:
    """Remove and return the records that wait in this process."""
    return _pop_all(_waiting)


def pop_unsettled() -> list[Unsettled]:
    """Remove and return the records whose reservations Redis still holds."""
    return _pop_all(_unsettled)


def _pop_all(queue: deque[T]) -> list[T]:
    records: list[T] = []
    while queue:
        records.append(queue.popleft())
    return records


def requeue_unsettled(records: list[Unsettled]) -> None:
    """Put back records whose reservations couldn't be released."""
    _unsettled.extend(records)


def requeue(records: list[UsageRecord]) -> None:
    """Put back records that couldn't be stored yet."""
    _waiting.extendleft(reversed(records))
