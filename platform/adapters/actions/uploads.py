"""Uploads in chunks, which can be resumed after a dropped connection."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from adapters import archive, store, upload_chunks
from adapters.actions.adapters import add_staged, check_free, check_model
from adapters.actions.base import require
from adapters.models import Adapter, AdapterUpload, AdapterVersion, check_name
from catalog.models import ServedModel
from common.db import PAGE, save_valid
from common.errors import (
    AdapterInvalid,
    AdapterTooLarge,
    Conflict,
    NotFound,
    OffsetMismatch,
    ServiceUnavailable,
)
from common.files import is_id, new_id
from common.object_storage import has_object_storage
from engine.contract.errors import InvalidRequest
from tenants.actors import Actor, to_actor
from tenants.audit import log_action
from tenants.models import Role, Tenant, User

logger = logging.getLogger(__name__)

#: Age of an upload's last chunk after which it is abandoned.
EXPIRES = timedelta(hours=24)
MAX_OPEN = 20


@transaction.atomic
def begin_upload(
    *,
    actor: Actor | User,
    tenant: Tenant | None,
    served_model: ServedModel,
    name: str,
    sizes: Mapping[str, int],
    description: str = "",
    promote: bool = False,
) -> AdapterUpload:
    """Start an upload with the names and sizes of an adapter's files; reserves the bytes.

    Raises: `NotFound`, `PermissionDenied`; `AdapterInvalid`, `AdapterTooLarge`; `Conflict` for a
    model's name, or with too many uploads open.
    """
    actor = to_actor(actor)
    require(actor, tenant, Role.MEMBER)
    check_model(tenant, served_model)
    _check_adapter(tenant, served_model, name)
    archive.check_names(sizes)
    for file, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidRequest(f"{file[:100]} must have at least 1 byte.", param="files")
    store.check(tenant, sum(sizes.values()))
    if AdapterUpload.objects.filter(tenant=tenant).count() >= MAX_OPEN:
        raise Conflict(f"{MAX_OPEN} uploads are open: finish or cancel one of them.")
    upload = AdapterUpload(
        public_id=new_id("upload-"),
        tenant=tenant,
        served_model=served_model,
        name=name,
        description=description,
        files=dict(sizes),
        num_bytes=sum(sizes.values()),
        promote=promote,
        created_by=actor.user,
    )
    save_valid(upload)
    log_action(actor, "adapter.upload", upload, tenant=tenant, name=name, bytes=upload.num_bytes)
    return upload


def append_chunk(
    *,
    actor: Actor | User,
    upload: AdapterUpload,
    file: str,
    offset: int,
    chunks: Iterable[bytes],
) -> int:
    """Append to a file of an upload; returns its size so far.

    Received bytes are kept if the rest fails. Raises: `NotFound`, `PermissionDenied`;
    `OffsetMismatch` if `offset` isn't the file's current size; `AdapterTooLarge` for more than was
    announced; `Conflict` while another chunk of the file arrives.
    """
    require(to_actor(actor), upload.tenant, Role.MEMBER)
    max_size = upload.files.get(file)
    if max_size is None:
        raise NotFound(f"The upload has no file {file[:100]!r}.", param="file")
    try:
        if has_object_storage():
            size = _add_chunk(upload, file, offset, chunks, max_size)
        else:
            with _partial(upload, file).open("ab") as partial:
                _lock(partial.fileno())
                current_size = os.fstat(partial.fileno()).st_size
                size = _append(partial.fileno(), file, offset, chunks, current_size, max_size)
    except OSError as error:
        raise ServiceUnavailable(f"The file can't be stored: {error.strerror}.") from error
    AdapterUpload.objects.filter(pk=upload.pk).update(touched_at=timezone.now())
    return size


def received_bytes(upload: AdapterUpload) -> dict[str, int]:
    sizes = {}
    for file in upload.files:
        if has_object_storage():
            sizes[file] = upload_chunks.received_bytes(upload.public_id, file)
            continue
        path = _partial(upload, file)
        sizes[file] = path.stat().st_size if path.is_file() else 0
    return sizes


def finish_upload(*, actor: Actor | User, upload: AdapterUpload) -> AdapterVersion:
    """Create a version from the upload; a worker checks it next.

    Raises: `Conflict` while bytes are missing; the errors of `add_staged`. An upload whose files
    aren't a valid adapter is discarded.
    """
    actor = to_actor(actor)
    require(actor, upload.tenant, Role.MEMBER)
    received = received_bytes(upload)
    for file, size in upload.files.items():
        if received[file] != size:
            raise Conflict(f"{file} has {received[file]} of {size} bytes so far.", param="files")
    try:
        version = add_staged(
            actor=actor,
            tenant=upload.tenant,
            served_model=upload.served_model,
            name=upload.name,
            source="upload",
            stage=lambda staged: _stage(upload, staged),
            description=upload.description,
            promote=upload.promote,
            upload=upload,
        )
    except (AdapterInvalid, AdapterTooLarge) as error:
        if error.code != store.FULL:  # the user may delete other versions and try again
            cancel_upload(actor=actor, upload=upload)
            _remove_files(upload.public_id)
        raise
    _remove_files(upload.public_id)
    return version


@transaction.atomic
def cancel_upload(*, actor: Actor | User, upload: AdapterUpload) -> None:
    """Discard an upload and its bytes."""
    actor = to_actor(actor)
    require(actor, upload.tenant, Role.MEMBER)
    log_action(actor, "adapter.upload_given_up", upload, tenant=upload.tenant)
    upload.delete()
    transaction.on_commit(lambda: _remove_files(upload.public_id))


def expire_uploads(now: datetime | None = None) -> int:
    """Discard abandoned uploads; returns how many."""
    limit, removed = (now or timezone.now()) - EXPIRES, 0
    expired = AdapterUpload.objects.filter(touched_at__lt=limit).order_by("pk")
    while page := list(expired[:PAGE]):
        AdapterUpload.objects.filter(pk__in=[upload.pk for upload in page]).delete()
        for upload in page:
            _remove_files(upload.public_id)
        removed += len(page)
    if has_object_storage():  # leftovers of a gateway that was killed
        for public_id in upload_chunks.upload_ids():
            if not AdapterUpload.objects.filter(public_id=public_id).exists():
                _remove_files(public_id)
    return removed


def _check_adapter(tenant: Tenant | None, served_model: ServedModel, name: str) -> None:
    """Reject an invalid name before gigabytes are uploaded."""
    exists = Adapter.objects.filter(tenant=tenant, served_model=served_model, name=name).exists()
    if exists:
        return
    try:
        check_name(name)
    except ValidationError as error:
        reason = " ".join(error.messages)
        raise InvalidRequest(f"name can't be {name[:100]!r}: {reason}", param="name") from error
    check_free(tenant, name)


def _folder(public_id: str) -> Path:
    if not is_id(public_id):
        raise NotFound("Upload not found.")
    return store.adapters_dir() / "uploads" / public_id


def _remove_files(public_id: str) -> None:
    archive.remove_staging(_folder(public_id))
    if has_object_storage():
        try:
            upload_chunks.remove_chunks(public_id)
        except ServiceUnavailable as error:  # its row is deleted, so the next sweep removes it
            logger.warning("%s stays until the next sweep: %s", public_id, error)


def _partial(upload: AdapterUpload, file: str) -> Path:
    archive.check_name(file)
    folder = _folder(upload.public_id)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / file


def _lock(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Conflict("Another piece of this file is arriving.", param="offset") from None


def _add_chunk(
    upload: AdapterUpload, file: str, offset: int, chunks: Iterable[bytes], max_size: int
) -> int:
    """`_append` for chunks that are stored as objects."""
    size = upload_chunks.received_bytes(upload.public_id, file)
    with tempfile.NamedTemporaryFile(dir=store.adapters_dir(), prefix=store.STAGING) as content:
        try:
            return _append(content.fileno(), file, offset, chunks, size, max_size)
        finally:
            upload_chunks.add_chunk(upload.public_id, file, offset, Path(content.name))


def _append(
    handle: int, file: str, offset: int, chunks: Iterable[bytes], current_size: int, max_size: int
) -> int:
    if offset != current_size:
        raise OffsetMismatch(
            f"{file} ends at byte {current_size}, the piece begins at {offset}.", current_size
        )
    for chunk in chunks:
        if current_size + len(chunk) > max_size:
            raise AdapterTooLarge(f"{file} was announced with {max_size} bytes.", param="files")
        current_size += os.write(handle, chunk)
    return current_size


def _stage(upload: AdapterUpload, staged: Path) -> None:
    """Stage the files to compute their digest."""
    if not has_object_storage():
        _stage_files(upload, _folder(upload.public_id), staged)
        return
    joined = store.staging_dir()  # not shared: another request may finish the upload concurrently
    try:
        for file in upload.files:
            upload_chunks.join_chunks(upload.public_id, file, joined / file)
        _stage_files(upload, joined, staged)
    finally:
        archive.remove_staging(joined)


def _stage_files(upload: AdapterUpload, folder: Path, staged: Path) -> None:
    (first, *rest) = upload.files
    limit = store.max_adapter_bytes()
    if archive.suffix_of(first) == archive.ZIP and not rest:
        archive.stage_zip(folder / first, staged, limit)
        return
    gguf = archive.suffix_of(first) == archive.GGUF
    for file in upload.files if gguf else archive.adapter_files(upload.files):
        name = store.GGUF_FILE if gguf else file
        os.link(folder / file, staged / name)
    archive.check_contents(staged)
