"""Closing a request's account: its usage goes to the spool, what it reserved too much goes back."""

from __future__ import annotations

import logging
from collections import deque

from django.conf import settings
from django.db import DatabaseError, InterfaceError
from redis.exceptions import RedisError

from metering.admission import reservation_key
from metering.ledger import insert_records
from metering.records import UsageRecord, encode_record
from metering.redis_clients import key, redis_link
from metering.scripts import run_script
from tenants.db_threads import in_db_thread

logger = logging.getLogger(__name__)

#: Records that wait in this process when Redis and the database are both away.
MAX_WAITING = 10_000
_waiting: deque[UsageRecord] = deque()


def spool_key() -> str:
    """The stream of records on their way into the ledger."""
    return key("usage")


async def settle(record: UsageRecord, *, reserved: bool = True) -> None:
    """Record what a request used, exactly once by its request id, however often this is called.

    `reserved`: its admission may have reserved tokens, which are corrected to what was used. One
    round trip to Redis. Without Redis the record goes to the database at once, and without that
    too it waits in this process, at most `MAX_WAITING` of them. Nothing is raised: the client has
    its answer, and what can't be kept is in the log.
    """
    entry, most = encode_record(record), settings.QUIRE["USAGE_SPOOL_MAX"]
    try:
        if reserved:
            keys = [reservation_key(record.request_id), spool_key()]
            await run_script(redis_link(), "settle", keys, [record.total_tokens, entry, most])
        else:
            await redis_link().execute("XADD", spool_key(), "MAXLEN", "~", most, "*", "r", entry)
    except (RedisError, OSError) as error:
        logger.warning("usage of %s goes past the spool: %s", record.request_id, error)
        await _without_redis(record)


async def _without_redis(record: UsageRecord) -> None:
    try:
        await in_db_thread(insert_records, [record])
    except (DatabaseError, InterfaceError) as error:
        if len(_waiting) >= MAX_WAITING:
            logger.error("usage lost, everything is away: %r", _waiting.popleft())
        _waiting.append(record)
        logger.error("usage of %s waits in memory: %s", record.request_id, error)


def take_waiting() -> list[UsageRecord]:
    """Remove and return the records that wait in this process."""
    records = []
    while _waiting:
        records.append(_waiting.popleft())
    return records


def put_back(records: list[UsageRecord]) -> None:
    """Return records that still found no place."""
    _waiting.extendleft(reversed(records))
