"""Files that come in parts: an upload is announced, gets its parts, and becomes a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial

from django.conf import settings
from django.db import transaction
from django.db.models import Sum
from django.utils import timezone

from engine.contract.errors import InvalidRequest
from storage.access import access_upload
from storage.actions.files import check_room, clean_filename, create_file, lifetime
from storage.actions.owners import actor_of, owner_fields
from storage.blobs import CHUNK, blob_path, remove_blob, write_blob
from storage.errors import Conflict
from storage.ids import new_id
from storage.models import StoredFile, StoredUpload, UploadPart, UploadStatus
from tenants.audit import record
from tenants.authentication import Caller
from tenants.models import Tenant

#: An upload that isn't completed by then is gone, as OpenAI has it.
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
    """Announce a file of `size` bytes. Raises `StorageFull` where it wouldn't fit."""
    check_room(caller.tenant_id, size, settings.QUIRE["TENANT_FILE_BYTES"], "bytes")
    row = StoredUpload.objects.create(
        public_id=new_id("upload_"),
        filename=clean_filename(filename),
        purpose=purpose,
        mime_type=mime_type,
        size=size,
        lifetime_s=lifetime_s,
        expires_at=timezone.now() + LIFETIME,
        **owner_fields(caller),
    )
    record(
        actor=actor_of(caller), action="upload.create", target=row, tenant=row.tenant, bytes=size
    )
    return row


def add_part(*, caller: Caller, public_id: str, size: int, chunks: Iterable[bytes]) -> UploadPart:
    """Keep a part: first its bytes, then its row.

    Raises: `NotFound`; `Conflict` for an upload that has ended; `StorageFull`; `InvalidRequest`
    for more than was announced.
    """
    row = _pending(access_upload(caller, public_id))
    room = settings.QUIRE["TENANT_FILE_BYTES"]
    _check_parts(row, size)
    check_room(caller.tenant_id, size, room, "data")
    name = new_id("part_")
    written = write_blob(caller.tenant_id, name, chunks)
    try:
        with transaction.atomic():
            # One at a time counts what is there already.
            Tenant.objects.select_for_update().get(pk=caller.tenant_id)
            row = _pending(StoredUpload.objects.get(pk=row.pk))
            _check_parts(row, written)
            check_room(caller.tenant_id, written, room, "data")
            return UploadPart.objects.create(upload=row, public_id=name, size=written)
    except BaseException:
        remove_blob(caller.tenant_id, name)
        raise


def complete_upload(
    *, caller: Caller, public_id: str, part_ids: list[str], md5: str | None = None
) -> StoredUpload:
    """Make the file of its parts in this order; parts that aren't named are dropped.

    Raises: `NotFound`; `Conflict` for an upload that has ended; `InvalidRequest` for parts that
    aren't its own or aren't what was announced.
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
        """With the file or not at all: one whose process dies before is still pending."""
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
    record(actor=actor_of(caller), action="upload.cancel", target=row, tenant=row.tenant)
    return row


def remove_ended_uploads() -> int:
    """Remove uploads past their end with the bytes of their parts; how many."""
    removed = 0
    for row in StoredUpload.objects.filter(expires_at__lte=timezone.now())[:1000]:
        _drop_parts(row)
        row.delete()
        removed += 1
    return removed


def _pending(row: StoredUpload) -> StoredUpload:
    if row.status != UploadStatus.PENDING:
        raise Conflict(f"The upload is {row.status}.")
    return row


def _claim(row: StoredUpload, status: UploadStatus, file: StoredFile | None = None) -> bool:
    """End it, unless somebody else did."""
    mine = StoredUpload.objects.filter(pk=row.pk, status=UploadStatus.PENDING)
    return bool(mine.update(status=status, file=file))


def _check_parts(row: StoredUpload, more: int) -> None:
    found = row.parts.aggregate(sum=Sum("size", default=0))
    if found["sum"] + more > row.size:
        raise InvalidRequest(
            f"{row.size} bytes were announced; {found['sum']} are there, and {more} more are too "
            "many.",
            param="data",
        )
    if row.parts.count() >= MAX_PARTS:
        raise InvalidRequest(f"An upload may have at most {MAX_PARTS} parts.", param="data")


def _chunks(tenant_id: int, part_ids: Iterable[str]) -> Iterator[bytes]:
    for name in part_ids:
        with blob_path(tenant_id, name).open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk


def _md5(tenant_id: int, part_ids: Iterable[str]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for chunk in _chunks(tenant_id, part_ids):
        digest.update(chunk)
    return digest.hexdigest()


def _drop_parts(row: StoredUpload) -> None:
    """Forget the parts, and their bytes once that is certain."""
    with transaction.atomic():
        for part in row.parts.all():
            transaction.on_commit(partial(remove_blob, row.tenant_id, part.public_id))
        row.parts.all().delete()
