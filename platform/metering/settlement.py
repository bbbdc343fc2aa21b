"""Closing a request's account: its usage goes to the spool, what it reserved too much goes back."""

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

from common.db import in_db_thread
from engine.contract import redis_keys
from engine.contract.redis_keys import written_key
from metering.admission import UNLIMITED, Admission, taken_key
from metering.ledger import insert_records
from metering.open_requests import GATEWAY, open_key, reservation_key
from metering.redis_scripts import key, redis_link, run_script
from metering.usage_record import UsageRecord, encode_record

# -- What a request is billed with beside what the engine wrote for it: for `reconcile_usage`.
#
# Replicas count what they write of each open request, in the script that writes it. Whoever
# settles a
# request closes that count in the script that settles, and adds it to sums by day, tenant and
# model:
# what the engine wrote, and how much of that isn't billed by rule. So a process that is killed
# leaves both or neither, and the ledger must hold the difference of the two.


#: What is summed, of prompts and of outputs.
SUMS = ("prompt", "unbilled_prompt", "output", "unbilled_output")


def sums_key() -> str:
    """Redis's hash of sums: `name_of` -> tokens."""
    return key("accounts")


def since_key() -> str:
    """When the sums begin: requests that came before aren't in them."""
    return key("accounts:since")


def name_of(day: str, tenant_id: int, model: str, what: str) -> str:
    """A field of `sums_key`."""
    return f"{day} {tenant_id} {what} {model}"


def parts_of(name: str) -> tuple[str, int, str, str]:
    """(day, tenant, what, model) of a field of `sums_key`."""
    day, tenant_id, what, model = name.split(" ", 3)
    return day, int(tenant_id), what, model


@dataclass(frozen=True)
class Account:
    """Which of the engine's requests a record is about.

    Attributes:
        names: the engine's ids. outputs: of each.
        whole: every output came to an end of the engine's own, so all of it is billed. Otherwise
            less may be: a stop string was found, the client left, nobody went on with it.
        billed_prompt, billed_output: what was settled of them before, under another id.
    """

    names: Sequence[str]
    outputs: int = 1
    whole: bool = False
    billed_prompt: int = 0
    billed_output: int = 0

    def encode(self, record: UsageRecord) -> bytes:
        """JSON, as `settle.lua` reads it."""
        started_at = cast(datetime, record.started_at).astimezone(UTC)
        day = f"{started_at:%Y-%m-%d}"
        fields = [
            redis_keys.output_field(n, i) for n, i in product(self.names, range(self.outputs))
        ]
        return msgspec.json.encode(
            {
                "prompts": [redis_keys.prompt_field(name) for name in self.names],
                "outputs": fields,
                "whole": self.whole,
                "prompt": record.prompt_tokens,
                "output": record.completion_tokens,
                "before": [self.billed_prompt, self.billed_output],
                "started": started_at.timestamp(),
                "sums": [name_of(day, record.tenant_id, record.model, what) for what in SUMS],
            }
        )


logger = logging.getLogger(__name__)

Unsettled = tuple[UsageRecord, Account | None]
T = TypeVar("T")
#: Closing the account of more outputs than that takes the event loop's time.
_FEW_OUTPUTS = 64
#: Records that wait in this process when Redis and the database are both away.
MAX_WAITING = 10_000
_waiting: deque[UsageRecord] = deque()
#: Records that are in the ledger, but whose reservations Redis still holds.
_unsettled: deque[Unsettled] = deque(maxlen=MAX_WAITING)


def spool_key() -> str:
    """The stream of records on their way into the ledger."""
    return key("usage")


def settle_keys(request_id: str, gateway: str = GATEWAY) -> list[str]:
    """As `settle.lua` has them."""
    return [
        reservation_key(request_id),
        spool_key(),
        open_key(gateway),
        taken_key(request_id),
        written_key(settings.QUIRE["KEY_PREFIX"]),
        sums_key(),
        since_key(),
    ]


def settle_arguments(
    record: UsageRecord,
    entry: bytes,
    epochs: Mapping[str, str],
    gateway: str = GATEWAY,
    account: Account | None = None,
) -> list[Any]:
    """As `settle.lua` has them."""
    most = settings.QUIRE["USAGE_SPOOL_MAX"]
    known = msgspec.json.encode(dict(epochs))
    told = account.encode(record) if account is not None else b""
    numbers = [record.total_tokens, entry, most, record.request_id, record.cost_nanos]
    return [*numbers, known, gateway, told]


async def settle(
    record: UsageRecord, admission: Admission | None = None, account: Account | None = None
) -> None:
    """Record what a request used, exactly once by its request id, however often this is called.

    `admission`: what it was let in with; what that holds is corrected to what was used. None: it
    may hold something. `account`: what the engine wrote of it is closed with that.

    One round trip to Redis. Without Redis the record goes to the database at once, and without that
    too it waits in this process, at most `MAX_WAITING` of them. Nothing is raised: the client has
    its answer, and what can't be kept is in the log.
    """
    admission = admission or HOLDING
    entry, most = encode_record(record), settings.QUIRE["USAGE_SPOOL_MAX"]
    try:
        if admission.held:
            keys = settle_keys(record.request_id)
            arguments = await _arguments(record, entry, admission.epochs, account)
            await run_script(redis_link(), "settle", keys, arguments)
        else:
            await redis_link().execute("XADD", spool_key(), "MAXLEN", "~", most, "*", "r", entry)
    except (RedisError, OSError) as error:
        logger.warning("usage of %s written directly to the database: %s", record.request_id, error)
        if admission.held:
            _unsettled.append((record, account))
        await _without_redis(record)


async def _arguments(
    record: UsageRecord, entry: bytes, epochs: Mapping[str, str], account: Account | None
) -> list[Any]:
    """Of a request with thousands of outputs, made beside the event loop."""
    if account is None or len(account.names) * account.outputs <= _FEW_OUTPUTS:
        return settle_arguments(record, entry, epochs, account=account)
    return await asyncio.to_thread(settle_arguments, record, entry, epochs, account=account)


HOLDING = Admission(**{**UNLIMITED.__dict__, "held": True})


async def _without_redis(record: UsageRecord) -> None:
    try:
        await in_db_thread(insert_records, [record])
    except (DatabaseError, InterfaceError) as error:
        if len(_waiting) >= MAX_WAITING:
            logger.error("usage lost, Redis and database unreachable: %r", _waiting.popleft())
        _waiting.append(record)
        logger.error("usage of %s buffered in memory: %s", record.request_id, error)


def take_waiting() -> list[UsageRecord]:
    """Remove and return the records that wait in this process."""
    return _take(_waiting)


def take_unsettled() -> list[Unsettled]:
    """Remove and return the records whose reservations Redis still holds."""
    return _take(_unsettled)


def _take(queue: deque[T]) -> list[T]:
    records: list[T] = []
    while queue:
        records.append(queue.popleft())
    return records


def put_back_unsettled(records: list[Unsettled]) -> None:
    """Return records whose reservations couldn't be given back."""
    _unsettled.extend(records)


def put_back(records: list[UsageRecord]) -> None:
    """Return records that still found no place."""
    _waiting.extendleft(reversed(records))
