"""Keeping files and letting go of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import partial

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from storage.access import access_file, stored_bytes
from storage.actions.owners import actor_of, owner_fields
from storage.blobs import remove_blob, sweep_blobs, write_blob
from storage.errors import Conflict, StorageFull
from storage.ids import new_id
from storage.models import (
    Batch,
    ItemConversation,
    SavedConversation,
    StoredCompletion,
    StoredFile,
    StoredResponse,
    UploadPart,
)
from storage.models.batch import OPEN
from tenants.audit import record
from tenants.authentication import Caller
from tenants.holdings import remove_in_parts
from tenants.models import Tenant

logger = logging.getLogger(__name__)

#: An upload or a batch that hasn't touched its bytes for so long is dead.
ORPHAN_AFTER_S = 3600.0


def create_file(
    *,
    caller: Caller,
    filename: str,
    purpose: str,
    size: int,
    chunks: Iterable[bytes],
    expires_at: datetime | None = None,
    frees: int = 0,
    then: Callable[[StoredFile], None] | None = None,
) -> StoredFile:
    """Keep a file: first its bytes, then its row.

    Args:
        filename: what the client calls it, any text. size: of all `chunks`, in bytes.
        frees: stored bytes that go when the file is there.
        then: what happens together with the file or not at all; what it raises undoes both.
    Raises: `StorageFull` (413); OSError when the disk doesn't take it.
    """
    room = settings.QUIRE["TENANT_FILE_BYTES"]
    public_id = new_id("file-")
    check_room(caller.tenant_id, size - frees, room)
    written = write_blob(caller.tenant_id, public_id, chunks)
    try:
        with transaction.atomic():
            # One upload at a time counts what the tenant has: two can't both take the last room.
            Tenant.objects.select_for_update().get(pk=caller.tenant_id)
            check_room(caller.tenant_id, written - frees, room)
            row = StoredFile.objects.create(
                public_id=public_id,
                filename=clean_filename(filename),
                purpose=purpose,
                size=written,
                expires_at=expires_at,
                **owner_fields(caller),
            )
            record(
                actor=actor_of(caller),
                action="file.create",
                target=row,
                tenant=row.tenant,
                bytes=written,
                purpose=purpose,
            )
            if then is not None:
                then(row)
    except BaseException:
        remove_blob(caller.tenant_id, public_id)
        raise
    return row


def check_room(tenant_id: int, size: int, room: int, param: str = "file") -> None:
    """Raise `StorageFull` when the tenant has no room for so many bytes more; 0 is no limit."""
    stored = stored_bytes(tenant_id) if room else 0
    if room and stored + size > room:
        raise StorageFull(
            f"This tenant's files may take {room} bytes; they take {stored}, and {size} more do "
            "not fit.",
            param=param,
        )


def clean_filename(name: str) -> str:
    """The last part of what the client calls it, one line of printable text."""
    last = name.replace("\\", "/").rpartition("/")[2]
    shown = "".join(char for char in last if char.isprintable())
    return shown[:255] or "file"


@transaction.atomic
def delete_file(*, caller: Caller, public_id: str) -> None:
    """Forget a file and its bytes. Raises `NotFound`; `Conflict` while a batch needs it."""
    row = access_file(caller, public_id)
    if needed_by_batches().filter(input_file_id=public_id).exists():
        raise Conflict("A batch that has not ended needs this file.")
    record(actor=actor_of(caller), action="file.delete", target=row, tenant=row.tenant)
    row.delete()
    transaction.on_commit(partial(remove_blob, caller.tenant_id, public_id))


def remove_expired() -> int:
    """Remove what is past its end, and bytes without an owner; return how many."""
    now, removed = timezone.now(), 0
    needed = needed_by_batches().values("input_file_id")
    gone = StoredFile.objects.filter(expires_at__lte=now).exclude(public_id__in=needed)
    for row in gone[:1000]:
        row.delete()
        remove_blob(row.tenant_id, row.public_id)
        removed += 1
    for kind in (StoredResponse, StoredCompletion, SavedConversation, ItemConversation):
        removed += kind.objects.filter(expires_at__lte=now).delete()[0]
    removed += _remove_kept_too_long()
    removed += sweep_blobs(_is_known, ORPHAN_AFTER_S)
    return removed


def _remove_kept_too_long() -> int:
    """Remove what tenants keep for so many days alone (`keep_content_days`); how much."""
    removed = 0
    for tenant in Tenant.objects.exclude(keep_content_days=None):
        before = timezone.now() - timedelta(days=tenant.keep_content_days or 0)
        old = {"tenant": tenant, "created_at__lt": before}
        for kind in (SavedConversation, ItemConversation):
            talks = kind.objects.filter(tenant=tenant, changed_at__lt=before)
            removed += remove_in_parts(talks)
        needed = needed_by_batches().filter(tenant=tenant).values("input_file_id")
        removed += remove_in_parts(Batch.objects.filter(**old).exclude(status__in=OPEN))
        removed += remove_in_parts(StoredCompletion.objects.filter(**old))
        removed += remove_in_parts(StoredResponse.objects.filter(**old, lease_until=None))
        for row in StoredFile.objects.filter(**old).exclude(public_id__in=needed)[:1000]:
            row.delete()
            remove_blob(row.tenant_id, row.public_id)
            removed += 1
    return removed


def needed_by_batches() -> QuerySet[Batch]:
    """Batches that have not ended."""
    return Batch.objects.filter(status__in=OPEN)


def _is_known(public_id: str) -> bool:
    """Whether bytes under this name are somebody's: a file's, a part's, a batch's."""
    if public_id.startswith(("batch_", "msgbatch_")):
        return needed_by_batches().filter(public_id=public_id).exists()
    if public_id.startswith("part_"):
        return UploadPart.objects.filter(public_id=public_id).exists()
    return StoredFile.objects.filter(public_id=public_id).exists()


def lifetime(seconds: int | None) -> datetime | None:
    """The moment so many seconds from now; None for no end."""
    return None if seconds is None else timezone.now() + timedelta(seconds=seconds)
