"""Closing a request's account: its usage goes to the spool, what it reserved too much goes back."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from django.conf import settings
from django.db import DatabaseError, InterfaceError
from redis.exceptions import RedisError

from engine.contract.protocol import written_key
from metering.accounts import Account, since_key, sums_key
from metering.admission import UNLIMITED, Admission, taken_key
from metering.gateways import GATEWAY, open_key, reservation_key
from metering.ledger import insert_records
from metering.records import UsageRecord, encode_record
from metering.redis_clients import key, redis_link
from metering.scripts import run_script
from tenants.db_threads import in_db_thread

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
