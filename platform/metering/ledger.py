"""Writing usage records into the ledger, each once."""

from collections.abc import Sequence
from datetime import datetime
from typing import cast

from metering.models import UsageEntry
from metering.records import UsageRecord


def insert_records(records: Sequence[UsageRecord]) -> None:
    """Add rows; a request id that is there already changes nothing. Raises DatabaseError."""
    # On SQLite `ignore_conflicts` would also hide a row that is wrong; the records are checked.
    UsageEntry.objects.bulk_create(
        [_entry(record) for record in records], batch_size=500, ignore_conflicts=True
    )


def _entry(record: UsageRecord) -> UsageEntry:
    return UsageEntry(
        request_id=record.request_id,
        tenant_id=record.tenant_id,
        api_key_id=record.key_id,
        user_id=record.user_id,
        endpoint=record.endpoint,
        model=record.model,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        finish_reason=record.finish_reason or "",
        status=record.status,
        started_at=cast(datetime, record.started_at),
        ttft_ms=record.ttft_ms,
        duration_ms=record.duration_ms,
        stream=record.stream,
    )
