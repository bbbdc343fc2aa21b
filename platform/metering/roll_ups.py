"""Adding to the ledger's sums by hour and day."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from django.db.backends.base.base import BaseDatabaseWrapper

from metering.models import UsageDay, UsageHour
from metering.models.roll_up import SUMS
from metering.records import UsageRecord

_OF = ("tenant_id", "start", "model", "adapter", "key_id", "user_id", "endpoint")
#: Rows of one statement: any SQLite takes their values.
ROWS = 60

Name = tuple[int, datetime, str, str, int, int, str]


def hour_of(moment: datetime) -> datetime:
    """The beginning of its hour, UTC."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def day_of(moment: datetime) -> datetime:
    """The beginning of its day, UTC."""
    return hour_of(moment).replace(hour=0)


def add_to_roll_ups(
    records: Sequence[UsageRecord], connection: BaseDatabaseWrapper, cursor: Any
) -> None:
    """Add records that were just written into the ledger, in the same transaction."""
    for table, start_of in ((UsageHour, hour_of), (UsageDay, day_of)):
        sums: dict[Name, list[int]] = defaultdict(lambda: [0] * len(SUMS))
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
            for at, amount in enumerate(_amounts(record)):
                total[at] += amount
        # In one order everywhere: two writers can't each wait for a row that the other has.
        _add(table, sorted(sums.items()), connection, cursor)


def _amounts(record: UsageRecord) -> tuple[int, ...]:
    """In the order of `SUMS`."""
    return (
        1,
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
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
    """`INSERT`, or add to the row that is there: the same words for SQLite and PostgreSQL."""
    quote = connection.ops.quote_name
    name = quote(table)
    columns = ", ".join(map(quote, (*_OF, *SUMS)))
    row = f"({', '.join(['%s'] * (len(_OF) + len(SUMS)))})"
    added = ", ".join(f"{quote(s)} = {name}.{quote(s)} + excluded.{quote(s)}" for s in SUMS)
    return (
        f"INSERT INTO {name} ({columns}) VALUES {', '.join([row] * rows)} "  # noqa: S608 - our names
        f"ON CONFLICT ({', '.join(map(quote, _OF))}) DO UPDATE SET {added}"
    )
