"""Batches: creating, running, cancelling; and leases of workers."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from common.errors import Conflict, check_pending_limit
from common.files import new_id
from common.messaging import broadcast_sync
from engine.contract.errors import InvalidRequest
from storage.access import (
    MESSAGES,
    access_batch,
    access_file,
    lease_is_free,
    open_batches,
    open_responses,
)
from storage.actions.files import check_file_quota, create_file, delete_file, lifetime
from storage.blobs import blob_path, link_blob, remove_blob
from storage.models import OPEN, Batch, BatchStatus, StoredFile, StoredResponse
from storage.ownership import actor_of, ownership_fields
from tenants.audit import log_action
from tenants.authentication import Caller

# A conditional UPDATE acquires a lease, so only one of two workers gets it.

Work = Batch | StoredResponse


def claim_batch(*, public_id: str, owner: str, seconds: float) -> Batch | None:
    """Lease the batch if it's open, unleased and within its tenant's share; else None."""
    limit = settings.QUIRE.tenant_quotas.running_batches
    if not _claim(open_batches(), public_id, owner, seconds, limit):
        return None
    return Batch.objects.select_related("tenant").get(public_id=public_id)


def claim_response(*, public_id: str, owner: str, seconds: float) -> StoredResponse | None:
    """Lease the background response if it's pending, unleased and within its tenant's share."""
    limit = settings.QUIRE.tenant_quotas.running_responses
    if not _claim(open_responses(), public_id, owner, seconds, limit):
        return None
    return StoredResponse.objects.select_related("tenant").get(public_id=public_id)


def _claim(
    rows: QuerySet[Any], public_id: str, owner: str, seconds: float, max_per_tenant: int
) -> bool:
    """Acquire the lease. Workers that count concurrently may slightly exceed a tenant's share."""
    mine = rows.filter(public_id=public_id)
    tenant = mine.values_list("tenant_id", flat=True).first()
    if rows.filter(~lease_is_free(), tenant_id=tenant).count() >= max_per_tenant:
        return False
    until = timezone.now() + timedelta(seconds=seconds)
    return bool(mine.filter(lease_is_free()).update(lease_owner=owner, lease_until=until))


def renew_lease(*, row: Work, owner: str, seconds: float) -> bool:
    """Extend the lease by this many seconds; False if another worker has it."""
    until = timezone.now() + timedelta(seconds=seconds)
    mine = type(row).objects.filter(pk=row.pk, lease_owner=owner)
    return bool(mine.update(lease_until=until))


def owner_of(process: int) -> str:
    """Prefix of the lease owners of a process on this machine."""
    return f"{socket.gethostname()[:20]}-{process}-"


def release_leases_of_dead(*, process: int) -> int:
    """Release the leases of a process on this machine that has ended; returns how many."""
    num_released = 0
    for kind in (Batch, StoredResponse):
        leased = kind.objects.filter(lease_owner__startswith=owner_of(process))
        num_released += leased.update(lease_owner="", lease_until=None)
    return num_released


def release_lease(*, row: Work, owner: str) -> None:
    mine = type(row).objects.filter(pk=row.pk, lease_owner=owner)
    mine.update(lease_owner="", lease_until=None)


@transaction.atomic
def create_batch(
    *,
    caller: Caller,
    input_file_id: str,
    endpoint: str,
    completion_window: str,
    window_s: int,
    metadata: dict[str, str],
    output_lifetime_s: int | None = None,
    prefix: str = "batch_",
    total: int = 0,
) -> Batch:
    """Create a batch from a file of the caller's tenant.

    Args:
        prefix: of its id. total: number of requests, if known.

    Raises: `NotFound` for the file, `InvalidRequest` for one of another purpose, `TooManyPending`,
    `StorageFull` if the tenant has exceeded its quota, as the results need space, too.
    """
    check_file_quota(caller.tenant_id, 0, settings.QUIRE.tenant_quotas.file_bytes, "input_file_id")
    waiting = open_batches().filter(tenant_id=caller.tenant_id).count()
    check_pending_limit(waiting, settings.QUIRE.tenant_quotas.open_batches, "batches")
    source = access_file(caller, input_file_id, "input_file_id")
    if source.purpose != "batch":
        raise InvalidRequest(
            f"The file's purpose is {source.purpose!r}, not 'batch'.", param="input_file_id"
        )
    row = Batch.objects.create(
        public_id=new_id(prefix),
        total=total,
        input_file_id=source.public_id,
        endpoint=endpoint,
        completion_window=completion_window,
        expires_at=timezone.now() + timedelta(seconds=window_s),
        metadata=metadata,
        output_lifetime_s=output_lifetime_s,
        **ownership_fields(caller),
    )
    _announce(row)
    log_action(
        actor_of(caller),
        "batch.create",
        row,
        tenant=row.tenant,
        endpoint=endpoint,
        input_file=source.public_id,
    )
    return row


def create_message_batch(
    *, caller: Caller, lines: Iterable[bytes], size: int, window_s: int
) -> Batch:
    """Create a batch of requests to `/v1/messages`, stored as a file with one per line.

    Args:
        lines: iterated once. size: their approximate total in bytes.

    Raises: `TooManyPending`, `StorageFull`, errors of iterating `lines`; nothing is stored then.
    """
    waiting = open_batches().filter(tenant_id=caller.tenant_id).count()
    check_pending_limit(waiting, settings.QUIRE.tenant_quotas.open_batches, "batches")
    total = 0

    def counted() -> Iterator[bytes]:
        nonlocal total
        for line in lines:
            total += 1
            yield line

    file = create_file(
        caller=caller, filename="requests.jsonl", purpose="batch", size=size, chunks=counted()
    )
    try:
        return create_batch(
            caller=caller,
            input_file_id=file.public_id,
            endpoint=MESSAGES,
            completion_window=f"{window_s // 3600}h",
            window_s=window_s,
            metadata={},
            prefix="msgbatch_",
            total=total,
        )
    except BaseException:
        delete_file(caller=caller, public_id=file.public_id)
        raise


@transaction.atomic
def delete_batch(*, caller: Caller, public_id: str) -> None:
    """Delete a finished batch with its requests and results.

    Raises: `NotFound`; `Conflict` for one that hasn't ended.
    """
    row = access_batch(caller, public_id)
    if row.status in OPEN:
        raise Conflict(f"The batch is {row.status}: cancel it first.")
    log_action(actor_of(caller), "batch.delete", row, tenant=row.tenant)
    results = [file.pk for file in (row.output_file, row.error_file) if file]
    mine = Q(pk__in=results) | Q(public_id=row.input_file_id, tenant_id=row.tenant_id)
    _announce(row)
    row.delete()
    for file in StoredFile.objects.filter(mine):
        transaction.on_commit(partial(remove_blob, file.tenant_id, file.public_id))
        file.delete()


@transaction.atomic
def cancel_batch(*, caller: Caller, public_id: str) -> Batch:
    """Request a batch's cancellation, which a worker performs. Repeating it changes nothing.

    Raises: `NotFound`; `Conflict` for a batch that has ended.
    """
    batch = access_batch(caller, public_id)
    row = Batch.objects.select_for_update().get(pk=batch.pk)
    if row.status == BatchStatus.CANCELLING:
        return batch
    if row.status not in OPEN:
        raise Conflict(f"The batch is {row.status} and can't be cancelled.")
    _set(row, BatchStatus.CANCELLING, "cancelling_at")
    log_action(actor_of(caller), "batch.cancel", row, tenant=row.tenant)
    return access_batch(caller, public_id)


@transaction.atomic
def start_batch(*, row: Batch, total: int) -> Batch:
    """Record that the file is valid, with `total` requests. A cancellation remains in effect."""
    row = _locked(row)
    row.total = total
    if row.status == BatchStatus.VALIDATING:
        row.status, row.in_progress_at = BatchStatus.IN_PROGRESS, timezone.now()
    row.save(update_fields=["status", "total", "in_progress_at"])
    _announce(row)
    return row


@transaction.atomic
def fail_batch(*, row: Batch, errors: list[dict[str, Any]]) -> Batch:
    """Record that the file is invalid, or that its owner has lost access."""
    row = _locked(row)
    if row.status not in OPEN:  # this worker had lost its lease without noticing
        return row
    row.errors = errors
    _set(row, BatchStatus.FAILED, "failed_at", "errors")
    return row


def update_progress(
    *, row: Batch, completed: int, failed: int, usage: dict[str, int], expired: int = 0
) -> str:
    """Store the counts; returns the current status, which tells the worker of a cancellation."""
    mine = Batch.objects.filter(pk=row.pk)
    mine.update(completed=completed, failed=failed, expired=expired, usage=usage)
    _announce(row)
    return str(mine.values_list("status", flat=True).get())


@transaction.atomic
def finish_batch(
    *,
    row: Batch,
    status: BatchStatus,
    output: Path,
    errors: Path,
    counts: dict[str, Any],
    problems: list[dict[str, Any]],
) -> Batch:
    """Turn the journals into files and finish the batch. Repeatable until it commits.

    Args:
        status: COMPLETED, CANCELLED, EXPIRED or FAILED. counts: of requests, and `usage`.
        problems: reasons of a failure, as the batch's `errors`.
    """
    row = _locked(row)
    if row.status not in OPEN:  # this worker had lost its lease without noticing
        return row
    for name in ("completed", "failed", "expired"):
        setattr(row, name, counts.get(name, 0))
    row.usage = counts["usage"]
    row.finalizing_at, row.errors = timezone.now(), problems
    row.output_file = _as_file(row, output, "output")
    row.error_file = _as_file(row, errors, "error")
    names = (
        "completed",
        "failed",
        "expired",
        "usage",
        "errors",
        "finalizing_at",
        "output_file",
        "error_file",
    )
    _set(row, status, f"{status.value}_at", *names)
    return row


def _as_file(row: Batch, journal: Path, kind: str) -> StoredFile | None:
    """The journal as a stored file; None if it is empty."""
    if not journal.exists() or journal.stat().st_size == 0:
        return None
    # The same name each time, so that a retry overwrites what a killed worker left.
    prefix = {"output": "0", "error": "1"}[kind]
    public_id = f"file-{prefix}{row.public_id.rpartition('_')[2][1:]}"
    size = link_blob(row.tenant_id, public_id, journal)
    return StoredFile.objects.create(
        public_id=public_id,
        filename=f"{row.public_id}_{kind}.jsonl",
        purpose="batch_output",
        size=size,
        expires_at=lifetime(row.output_lifetime_s),
        tenant_id=row.tenant_id,
        key_id=row.key_id,
        user_id=row.user_id,
    )


def journal_paths(row: Batch) -> tuple[Path, Path]:
    """Files that collect a running batch's results: output and errors."""
    return (
        blob_path(row.tenant_id, row.public_id, ".output"),
        blob_path(row.tenant_id, row.public_id, ".errors"),
    )


def _locked(row: Batch) -> Batch:
    rows = Batch.objects.select_for_update(of=("self",)).select_related("tenant")
    return rows.get(pk=row.pk)


def _set(row: Batch, status: BatchStatus, moment: str, *fields: str) -> None:
    row.status = status
    setattr(row, moment, timezone.now())
    row.save(update_fields=["status", moment, *fields])
    _announce(row)


def _announce(row: Batch) -> None:
    """Notify pages that show the tenant's batches, once the change is committed."""
    transaction.on_commit(partial(broadcast_sync, "batches", {}, tenant_id=row.tenant_id))
