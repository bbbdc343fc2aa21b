"""Writing usage records into the ledger exactly once, and adding them to hourly and daily sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.constants import OnConflict
from django.utils import timezone

from metering.models import SUM_FIELDS, UsageDay, UsageEntry, UsageHour
from metering.usage_record import UsageRecord

_OF = ("tenant_id", "start", "model", "adapter", "key_id", "user_id", "endpoint")
#: Maximum number of rows per statement, within SQLite's limit on parameters.
ROWS = 60

Name = tuple[int, datetime, str, str, int, int, str]


def hour_of(moment: datetime) -> datetime:
    """The start of the record's hour, UTC."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def day_of(moment: datetime) -> datetime:
    """The start of the record's day, UTC."""
    return hour_of(moment).replace(hour=0)


def update_rollups(
    records: Sequence[UsageRecord], connection: BaseDatabaseWrapper, cursor: Any
) -> None:
    """Add records to the sums, in the transaction that writes them into the ledger."""
    for table, start_of in ((UsageHour, hour_of), (UsageDay, day_of)):
        sums: dict[Name, list[int]] = defaultdict(lambda: [0] * len(SUM_FIELDS))
        for record in records:
            started_at = cast(datetime, record.started_at)
            name = (
                record.tenant_id,
                start_of(started_at),
                record.model,
                record.adapter,
                record.key_id or 0,
                record.user_id or 0,
                record.endpoint,
            )
            total = sums[name]
            for index, amount in enumerate(_amounts(record)):
                total[index] += amount
        # A fixed order prevents deadlocks between concurrent writers.
        _add(table, sorted(sums.items()), connection, cursor)


def _amounts(record: UsageRecord) -> tuple[int, ...]:
    """The record's amounts, in the order of `SUM_FIELDS`."""
    return (
        1,
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        record.images,
        record.audio_ms,
        record.cost_nanos,
    )


def _add(
    table: type[UsageHour] | type[UsageDay],
    sums: Sequence[tuple[Name, Iterable[int]]],
    connection: BaseDatabaseWrapper,
    cursor: Any,
) -> None:
    adapt = connection.ops.adapt_datetimefield_value
    for start in range(0, len(sums), ROWS):
        part = sums[start : start + ROWS]
        values: list[Any] = []
        for name, amounts in part:
            tenant_id, moment, *rest = name
            values += [tenant_id, adapt(moment), *rest, *amounts]
        cursor.execute(_statement(table._meta.db_table, connection, len(part)), values)


def _statement(table: str, connection: BaseDatabaseWrapper, rows: int) -> str:
    """`INSERT`, or add to the existing row: a statement for both SQLite and PostgreSQL."""
    quote = connection.ops.quote_name
    name = quote(table)
    columns = ", ".join(map(quote, (*_OF, *SUM_FIELDS)))
    row = f"({', '.join(['%s'] * (len(_OF) + len(SUM_FIELDS)))})"
    added = ", ".join(f"{quote(s)} = {name}.{quote(s)} + excluded.{quote(s)}" for s in SUM_FIELDS)
    return (
        f"INSERT INTO {name} ({columns}) VALUES {', '.join([row] * rows)} "  # noqa: S608 - our names
        f"ON CONFLICT ({', '.join(map(quote, _OF))}) DO UPDATE SET {added}"
    )


#: Maximum number of rows per statement: 920 parameters, within SQLite's limit.
LEDGER_ROWS = 40
#: Columns in the order of `_row`.
_FIELDS = (
    *("request_id", "tenant", "api_key", "user", "endpoint", "model"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos", "finish_reason"),
    *("status", "started_at", "ttft_ms", "duration_ms", "stream", "recorded_at"),
    *("adapter", "adapter_digest", "in_place_of", "image_tokens", "images", "audio_ms"),
)


def insert_records(records: Sequence[UsageRecord]) -> None:
    """Insert rows; those whose request id exists already are skipped. Raises DatabaseError.

    `bulk_create` takes ten times as long. One statement per row would contend with the event loop
    for the GIL each time, in a process that serves requests.
    """
    if not records:
        return
    using = router.db_for_write(UsageEntry)
    connection = connections[using]
    now = connection.ops.adapt_datetimefield_value(timezone.now())
    by_id = {record.request_id: record for record in reversed(records)}
    new: set[str] = set()
    # SQLite's OR IGNORE would also hide invalid rows; records are validated beforehand.
    with transaction.atomic(using), connection.cursor() as cursor:
        for start in range(0, len(records), LEDGER_ROWS):
            part = records[start : start + LEDGER_ROWS]
            values = [value for record in part for value in _row(record, connection, now)]
            cursor.execute(_insert_statement(connection, len(part)), values)
            new.update(row[0] for row in cursor.fetchall())
        if new:
            # Of several records with one id, the first is the one that was inserted.
            written = [by_id[request_id] for request_id in new]
            update_rollups(written, connection, cursor)


def _insert_statement(connection: BaseDatabaseWrapper, rows: int) -> str:
    """The database's own `INSERT` that skips existing rows."""
    ops, meta = connection.ops, UsageEntry._meta
    quote = ops.quote_name
    column_by_field = {field.name: str(field.column) for field in meta.concrete_fields}
    columns = ", ".join(quote(column_by_field[name]) for name in _FIELDS)
    row = f"({', '.join(['%s'] * len(_FIELDS))})"
    insert = f"{ops.insert_statement(OnConflict.IGNORE)} {quote(meta.db_table)}"
    suffix = ops.on_conflict_suffix_sql(meta.fields, OnConflict.IGNORE, [], [])
    returning = f"RETURNING {quote('request_id')}"
    return f"{insert} ({columns}) VALUES {', '.join([row] * rows)} {suffix} {returning}"


def _row(record: UsageRecord, connection: BaseDatabaseWrapper, now: Any) -> tuple[Any, ...]:
    started_at = cast(datetime, record.started_at)
    return (
        record.request_id,
        record.tenant_id,
        record.key_id,
        record.user_id,
        record.endpoint,
        record.model,
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        record.cost_nanos,
        record.finish_reason or "",
        record.status,
        connection.ops.adapt_datetimefield_value(started_at),
        record.ttft_ms,
        record.duration_ms,
        record.stream,
        now,
        record.adapter,
        record.adapter_digest,
        record.in_place_of,
        record.image_tokens,
        record.images,
        record.audio_ms,
    )
