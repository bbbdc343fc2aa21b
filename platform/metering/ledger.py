"""Writing usage records into the ledger, each once, and into its sums by hour and day."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.constants import OnConflict
from django.utils import timezone

from metering.models import UsageEntry
from metering.records import UsageRecord
from metering.roll_ups import add_to_roll_ups

#: Of one statement. Any SQLite takes their 950 values.
ROWS = 50
#: Columns in the order of `_row`.
_FIELDS = (
    *("request_id", "tenant", "api_key", "user", "endpoint", "model"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos", "finish_reason"),
    *("status", "started_at", "ttft_ms", "duration_ms", "stream", "recorded_at"),
    *("adapter", "adapter_digest", "in_place_of"),
)


def insert_records(records: Sequence[UsageRecord]) -> None:
    """Add rows; a request id that is there already changes nothing. Raises DatabaseError.

    `bulk_create` takes ten times as long, and a statement a row would take Python's lock from the
    event loop each time, in a process that serves.
    """
    if not records:
        return
    using = router.db_for_write(UsageEntry)
    connection = connections[using]
    now = connection.ops.adapt_datetimefield_value(timezone.now())
    by_id = {record.request_id: record for record in reversed(records)}
    new: set[str] = set()
    # On SQLite a conflict that is ignored would also hide a row that is wrong; records are checked.
    with transaction.atomic(using), connection.cursor() as cursor:
        for start in range(0, len(records), ROWS):
            part = records[start : start + ROWS]
            values = [value for record in part for value in _row(record, connection, now)]
            cursor.execute(_statement(connection, len(part)), values)
            new.update(row[0] for row in cursor.fetchall())
        if new:
            # The first of several with one id is the one that was written.
            written = [by_id[request_id] for request_id in new]
            add_to_roll_ups(written, connection, cursor)


def _statement(connection: BaseDatabaseWrapper, rows: int) -> str:
    """`INSERT` that passes over what is there, in the database's own words."""
    ops, meta = connection.ops, UsageEntry._meta
    quote = ops.quote_name
    columns = ", ".join(quote(str(meta.get_field(name).column)) for name in _FIELDS)
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
    )
