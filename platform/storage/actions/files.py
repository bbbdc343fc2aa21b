"""Storing and deleting files, and multipart uploads."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from functools import partial

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet, Sum
from django.utils import timezone

from common.db import PAGE
from common.errors import Conflict, StorageFull
from common.files import new_id
from engine.contract.errors import InvalidRequest
from storage.access import access_file, access_upload, stored_bytes
from storage.blobs import CHUNK, delete_orphan_blobs, open_blob, remove_blob, write_blob
from storage.models import (
    OPEN,
    Batch,
    ItemConversation,
    SavedConversation,
    StoredCompletion,
    StoredFile,
    StoredResponse,
    StoredUpload,
    UploadPart,
    UploadStatus,
)
from storage.ownership import actor_of, ownership_fields
from tenants.audit import log_action
from tenants.authentication import Caller
from tenants.models import Tenant
from tenants.tenant_data import delete_in_batches

logger = logging.getLogger(__name__)

#: Age of the last write after which bytes without a row belong to a dead upload or batch.
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
    """Store a file: first its bytes, then its row.

    Args:
        filename: the client's name for it, any text. size: of all `chunks`, in bytes.
        frees: stored bytes that are deleted once the file exists.
        then: runs in the same transaction; its exceptions undo both.
    Raises: `StorageFull` (413); OSError if the disk can't store it.
    """
    max_bytes = settings.QUIRE.tenant_quotas.file_bytes
    public_id = new_id("file-")
    check_file_quota(caller.tenant_id, size - frees, max_bytes)
    written = write_blob(caller.tenant_id, public_id, chunks)
    try:
        with transaction.atomic():
            # Serializes uploads of the tenant: two can't both take the last of the quota.
            Tenant.objects.select_for_update().get(pk=caller.tenant_id)
            check_file_quota(caller.tenant_id, written - frees, max_bytes)
            row = StoredFile.objects.create(
                public_id=public_id,
                filename=clean_filename(filename),
                purpose=purpose,
                size=written,
                expires_at=expires_at,
                **ownership_fields(caller),
            )
            log_action(
                actor_of(caller),
                "file.create",
                row,
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


def check_file_quota(tenant_id: int, size: int, max_bytes: int, param: str = "file") -> None:
    """Raise `StorageFull` if the bytes would exceed the tenant's quota; 0 is no limit."""
    stored = stored_bytes(tenant_id) if max_bytes else 0
    if max_bytes and stored + size > max_bytes:
        raise StorageFull(
            f"This tenant's files may take {max_bytes} bytes; they take {stored}, and {size} more "
            "do not fit.",
            param=param,
        )


def clean_filename(name: str) -> str:
    """The last component of the client's file name, as one line of printable text."""
    last = name.replace("\\", "/").rpartition("/")[2]
    printable = "".join(char for char in last if char.isprintable())
    return printable[:255] or "file"


@transaction.atomic
def delete_file(*, caller: Caller, public_id: str) -> None:
    """Delete a file and its bytes. Raises `NotFound`; `Conflict` while a batch needs it."""
    row = access_file(caller, public_id)
    if needed_by_batches().filter(input_file_id=public_id).exists():
        raise Conflict("A batch that has not ended needs this file.")
    log_action(actor_of(caller), "file.delete", row, tenant=row.tenant)
    row.delete()
    transaction.on_commit(partial(remove_blob, caller.tenant_id, public_id))


def remove_expired() -> int:
    """Delete expired files, and bytes without a row; returns how many."""
    now, removed = timezone.now(), 0
    needed = needed_by_batches().values("input_file_id")
    expired_files = StoredFile.objects.filter(expires_at__lte=now)
    removed += _delete_files(expired_files.exclude(public_id__in=needed))
    for kind in (StoredResponse, StoredCompletion, SavedConversation, ItemConversation):
        removed += delete_in_batches(kind.objects.filter(expires_at__lte=now))
    removed += _remove_kept_too_long()
    removed += delete_orphan_blobs(_find_referenced, ORPHAN_AFTER_S)
    return removed


def _delete_files(rows: QuerySet[StoredFile]) -> int:
    """Delete files with their bytes, a page at a time; returns how many."""
    removed = 0
    while page := list(rows.order_by("pk").values_list("pk", "tenant_id", "public_id")[:PAGE]):
        StoredFile.objects.filter(pk__in=[pk for pk, _, _ in page]).delete()
        for _, tenant_id, public_id in page:
            remove_blob(tenant_id, public_id)
        removed += len(page)
    return removed


def _remove_kept_too_long() -> int:
    """Delete content beyond its tenant's `keep_content_days`; returns how many objects."""
    removed = 0
    for tenant in Tenant.objects.exclude(keep_content_days=None):
        cutoff = timezone.now() - timedelta(days=tenant.keep_content_days or 0)
        old = {"tenant": tenant, "created_at__lt": cutoff}
        for kind in (SavedConversation, ItemConversation):
            talks = kind.objects.filter(tenant=tenant, changed_at__lt=cutoff)
            removed += delete_in_batches(talks)
        needed = needed_by_batches().filter(tenant=tenant).values("input_file_id")
        removed += delete_in_batches(Batch.objects.filter(**old).exclude(status__in=OPEN))
        removed += delete_in_batches(StoredCompletion.objects.filter(**old))
        removed += delete_in_batches(StoredResponse.objects.filter(**old, lease_until=None))
        removed += _delete_files(StoredFile.objects.filter(**old).exclude(public_id__in=needed))
    return removed


def needed_by_batches() -> QuerySet[Batch]:
    """Batches that have not ended."""
    return Batch.objects.filter(status__in=OPEN)


def _find_referenced(public_ids: set[str]) -> set[str]:
    """Those of the ids that belong to a file, an upload's part or an unfinished batch."""
    referenced: set[str] = set()
    for rows in (StoredFile.objects, UploadPart.objects, needed_by_batches()):
        files = rows.filter(public_id__in=public_ids).order_by()
        referenced.update(files.values_list("public_id", flat=True))
    return referenced


def lifetime(seconds: int | None) -> datetime | None:
    """The time this many seconds from now; None for no expiry."""
    return None if seconds is None else timezone.now() + timedelta(seconds=seconds)


#: Lifetime of an upload that isn't completed, as in OpenAI's API.
LIFETIME = timedelta(hours=1)
MAX_PARTS = 10_000


@transaction.atomic
def create_upload(
    *,
    caller: Caller,
    filename: str,
    purpose: str,
    mime_type: str,
    size: int,
    lifetime_s: int | None = None,
) -> StoredUpload:
    """Start an upload of `size` bytes. Raises `StorageFull` if it exceeds the quota."""
    check_file_quota(caller.tenant_id, size, settings.QUIRE.tenant_quotas.file_bytes, "bytes")
    row = StoredUpload.objects.create(
        public_id=new_id("upload_"),
        filename=clean_filename(filename),
        purpose=purpose,
        mime_type=mime_type,
        size=size,
        lifetime_s=lifetime_s,
        expires_at=timezone.now() + LIFETIME,
        **ownership_fields(caller),
    )
    log_action(actor_of(caller), "upload.create", row, tenant=row.tenant, bytes=size)
    return row


def add_part(*, caller: Caller, public_id: str, size: int, chunks: Iterable[bytes]) -> UploadPart:
    """Store a part: first its bytes, then its row.

    Raises: `NotFound`; `Conflict` for an upload that has ended; `StorageFull`; `InvalidRequest`
    for more than was announced.
    """
    row = _pending(access_upload(caller, public_id))
    max_bytes = settings.QUIRE.tenant_quotas.file_bytes
    _check_parts(row, size)
    check_file_quota(caller.tenant_id, size, max_bytes, "data")
    name = new_id("part_")
    written = write_blob(caller.tenant_id, name, chunks)
    try:
        with transaction.atomic():
            # Serializes parts, so that each counts the others.
            Tenant.objects.select_for_update().get(pk=caller.tenant_id)
            row = _pending(StoredUpload.objects.get(pk=row.pk))
            _check_parts(row, written)
            check_file_quota(caller.tenant_id, written, max_bytes, "data")
            return UploadPart.objects.create(upload=row, public_id=name, size=written)
    except BaseException:
        remove_blob(caller.tenant_id, name)
        raise


def complete_upload(
    *, caller: Caller, public_id: str, part_ids: list[str], md5: str | None = None
) -> StoredUpload:
    """Create the file from its parts in this order; parts that aren't listed are dropped.

    Raises: `NotFound`; `Conflict` for an upload that has ended; `InvalidRequest` for parts of other
    uploads or a size that differs from the announced one.
    """
    row = _pending(access_upload(caller, public_id))
    parts = {part.public_id: part for part in row.parts.all()}
    if len(set(part_ids)) != len(part_ids) or not set(part_ids) <= parts.keys():
        raise InvalidRequest("Each entry must be a part of this upload, once.", param="part_ids")
    size = sum(parts[name].size for name in part_ids)
    if size != row.size:
        raise InvalidRequest(
            f"The parts have {size} bytes together; {row.size} were announced.", param="part_ids"
        )
    if md5 is not None and _md5(row.tenant_id, part_ids) != md5.lower():
        raise InvalidRequest("The parts have another checksum.", param="md5")

    def end(file: StoredFile) -> None:
        """Runs in the file's transaction: if the process dies before, the upload stays pending."""
        if not _claim(row, UploadStatus.COMPLETED, file):
            raise Conflict("The upload is already closed.")
        row.file, row.status = file, UploadStatus.COMPLETED
        _drop_parts(row)

    create_file(
        caller=caller,
        filename=row.filename,
        purpose=row.purpose,
        size=size,
        chunks=_chunks(row.tenant_id, part_ids),
        expires_at=lifetime(row.lifetime_s),
        frees=sum(part.size for part in parts.values()),
        then=end,
    )
    return row


@transaction.atomic
def cancel_upload(*, caller: Caller, public_id: str) -> StoredUpload:
    """End an upload without a file. Raises `NotFound`; `Conflict` for one that has ended."""
    row = _pending(access_upload(caller, public_id))
    if not _claim(row, UploadStatus.CANCELLED):
        raise Conflict("The upload is already closed.")
    row.status = UploadStatus.CANCELLED
    _drop_parts(row)
    log_action(actor_of(caller), "upload.cancel", row, tenant=row.tenant)
    return row


def remove_ended_uploads() -> int:
    """Delete expired uploads with the bytes of their parts; returns how many."""
    removed, expired = 0, StoredUpload.objects.filter(expires_at__lte=timezone.now())
    while page := list(expired.order_by("pk").values_list("pk", flat=True)[:PAGE]):
        parts = UploadPart.objects.filter(upload__in=page).order_by()
        blobs = list(parts.values_list("upload__tenant_id", "public_id"))
        StoredUpload.objects.filter(pk__in=page).delete()  # cascades to their parts
        for tenant_id, public_id in blobs:
            remove_blob(tenant_id, public_id)
        removed += len(page)
    return removed


def _pending(row: StoredUpload) -> StoredUpload:
    if row.status != UploadStatus.PENDING:
        raise Conflict(f"The upload is {row.status}.")
    return row


def _claim(row: StoredUpload, status: UploadStatus, file: StoredFile | None = None) -> bool:
    """End it, unless another request has."""
    mine = StoredUpload.objects.filter(pk=row.pk, status=UploadStatus.PENDING)
    return bool(mine.update(status=status, file=file))


def _check_parts(row: StoredUpload, more: int) -> None:
    sums = row.parts.aggregate(sum=Sum("size", default=0))
    if sums["sum"] + more > row.size:
        raise InvalidRequest(
            f"{row.size} bytes were announced; {sums['sum']} are there, and {more} more are too "
            "many.",
            param="data",
        )
    if row.parts.count() >= MAX_PARTS:
        raise InvalidRequest(f"An upload may have at most {MAX_PARTS} parts.", param="data")


def _chunks(tenant_id: int, part_ids: Iterable[str]) -> Iterator[bytes]:
    for name in part_ids:
        with open_blob(tenant_id, name) as file:
            while chunk := file.read(CHUNK):
                yield chunk


def _md5(tenant_id: int, part_ids: Iterable[str]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for chunk in _chunks(tenant_id, part_ids):
        digest.update(chunk)
    return digest.hexdigest()


def _drop_parts(row: StoredUpload) -> None:
    """Delete the parts, and their bytes after the commit."""
    with transaction.atomic():
        for part in row.parts.all():
            transaction.on_commit(partial(remove_blob, row.tenant_id, part.public_id))
        row.parts.all().delete()
