"""Rows of requests into the database, many in one statement; one that is there stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from django.db import connections, router, transaction
from django.db.models import Model
from django.db.models.constants import OnConflict

from metering.models import RequestContent, RequestEntry
from metering.records import UsageRecord
from metering.requests.note import RequestNote, note_text

#: Values of one statement that any SQLite takes.
VALUES = 900
_ENTRY = (
    *("request_id", "header_id", "answer_id", "tenant", "api_key", "user", "endpoint", "model"),
    *("adapter", "adapter_digest", "status", "code", "times", "finish_reason", "stream"),
    *("started_at", "duration_ms", "ttft_ms", "queue_ms", "prompt_tokens", "cached_tokens"),
    *("completion_tokens", "cost_nanos", "replica", "detail"),
)
_CONTENT = ("request_id", "tenant", "prompt", "answer", "at")


@dataclass(frozen=True, slots=True)
class Served:
    """A request with what it used. `times`: as in `RequestEntry`."""

    record: UsageRecord
    note: RequestNote
    times: int = 1


@dataclass(frozen=True, slots=True)
class Content:
    """What was asked and answered."""

    request_id: str
    tenant_id: int
    prompt: str
    answer: str
    at: datetime


def insert(items: Sequence[Served | Content]) -> None:
    """Write them in one transaction. Raises DatabaseError."""
    entries = [_entry(item) for item in items if isinstance(item, Served)]
    contents = [_content(item) for item in items if isinstance(item, Content)]
    with transaction.atomic(router.db_for_write(RequestEntry)):
        _insert(RequestEntry, _ENTRY, entries)
        _insert(RequestContent, _CONTENT, contents)


def _entry(item: Served) -> tuple[Any, ...]:
    record, note = item.record, item.note
    return (
        record.request_id,
        note.header_id,
        note.answer_id,
        record.tenant_id,
        record.key_id,
        record.user_id,
        record.endpoint,
        record.model,
        record.adapter,
        record.adapter_digest,
        record.status,
        note.code[:60],
        item.times,
        record.finish_reason or "",
        record.stream,
        cast(datetime, record.started_at),
        record.duration_ms,
        record.ttft_ms,
        note.first.queue_ms,
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        record.cost_nanos,
        note.replica[:200],
        note_text(note),
    )


def _content(item: Content) -> tuple[Any, ...]:
    return item.request_id, item.tenant_id, item.prompt, item.answer, item.at


def _insert(model: type[Model], names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """`INSERT` that passes over what is there; `bulk_create` takes ten times as long."""
    connection = connections[router.db_for_write(model)]
    ops, meta = connection.ops, model._meta
    columns = ", ".join(ops.quote_name(str(meta.get_field(name).column)) for name in names)
    row = f"({', '.join(['%s'] * len(names))})"
    insert = f"{ops.insert_statement(OnConflict.IGNORE)} {ops.quote_name(meta.db_table)}"
    suffix = ops.on_conflict_suffix_sql(meta.fields, OnConflict.IGNORE, [], [])
    adapt, values = ops.adapt_datetimefield_value, list(rows)
    with connection.cursor() as cursor:
        step = VALUES // len(names)
        for start in range(0, len(values), step):
            part = values[start : start + step]
            flat = [adapt(v) if isinstance(v, datetime) else v for each in part for v in each]
            cursor.execute(
                f"{insert} ({columns}) VALUES {', '.join([row] * len(part))} {suffix}", flat
            )
