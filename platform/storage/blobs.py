"""Files' bytes on disk: one folder per tenant, with names that the server generates.

`<files dir>/<tenant's number>/<public id>`; a running batch has its journals in the same folder as
`<batch id>.output` and `<batch id>.errors`. Every gateway and worker must see the same folder.

With an object storage the files are objects `files/<tenant's number>/<public id>`, and the folder
is this machine's cache of them. A file never changes, and its id is random, so cached copies are
never stale.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from django.conf import settings

from common import object_storage
from common.db import pages
from common.errors import NotFound, ServiceUnavailable
from common.files import is_id
from common.object_storage import PARTIAL, has_object_storage

logger = logging.getLogger(__name__)

CHUNK = 1 << 16
#: Folder of the object storage.
FOLDER = "files"


def files_dir() -> Path:
    """The folder of files, mode 0700."""
    folder = settings.QUIRE.files_dir
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def tenant_dir(tenant_id: int) -> Path:
    folder = files_dir() / str(int(tenant_id))
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def blob_path(tenant_id: int, public_id: str, suffix: str = "") -> Path:
    """A file's path on this machine. Raises `NotFound` for an invalid id."""
    if not is_id(public_id):
        raise NotFound("File not found.")
    return tenant_dir(tenant_id) / f"{public_id}{suffix}"


def open_blob(tenant_id: int, public_id: str) -> IO[bytes]:
    """Open a file. It can be read to its end even if it's deleted meanwhile. Blocks.

    Raises: FileNotFoundError; OSError, `ServiceUnavailable`.
    """
    path = blob_path(tenant_id, public_id)
    if not has_object_storage():
        return path.open("rb")
    try:
        file = path.open("rb")
    except FileNotFoundError:
        object_storage.download_object(_object_name(tenant_id, public_id), path)
        file = path.open("rb")
        object_storage.trim_cache(files_dir(), settings.QUIRE.object_cache_bytes)
    os.utime(file.fileno())  # the cache removes the least recently used copies first
    return file


def fetched_blob(tenant_id: int, public_id: str) -> Path:
    """A file's path, to be opened at once: the cache may remove copies of objects."""
    with suppress(FileNotFoundError):  # opening it will raise the error
        open_blob(tenant_id, public_id).close()
    return blob_path(tenant_id, public_id)


def blob_url(tenant_id: int, public_id: str, disposition: str) -> str | None:
    """See `common.object_storage.presigned_url`."""
    return object_storage.presigned_url(_object_name(tenant_id, public_id), disposition)


def _object_name(tenant_id: int, public_id: str) -> str:
    return f"{FOLDER}/{int(tenant_id)}/{public_id}"


def write_blob(tenant_id: int, public_id: str, chunks: Iterable[bytes]) -> int:
    """Write a file atomically, mode 0600; returns its size in bytes.

    Raises: OSError, `ServiceUnavailable`.
    """
    target, size = blob_path(tenant_id, public_id), 0
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                size += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if has_object_storage():
            object_storage.upload_object(_object_name(tenant_id, public_id), Path(temporary))
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if has_object_storage():
        object_storage.trim_cache(files_dir(), settings.QUIRE.object_cache_bytes)
    return size


def link_blob(tenant_id: int, public_id: str, source: Path) -> int:
    """Link a finished journal under a file's name and keep the journal; returns the size.

    Repeatable.
    """
    target = blob_path(tenant_id, public_id)
    target.unlink(missing_ok=True)
    if has_object_storage():  # don't cache it: another machine may repeat it with another journal
        object_storage.upload_object(_object_name(tenant_id, public_id), source)
    else:
        os.link(source, target)
    return source.stat().st_size


def remove_blob(tenant_id: int, public_id: str) -> None:
    """Remove a file's bytes if they exist."""
    blob_path(tenant_id, public_id).unlink(missing_ok=True)
    if has_object_storage():
        try:
            object_storage.delete_object(_object_name(tenant_id, public_id))
        except ServiceUnavailable as error:  # its row is deleted, so the next sweep removes it
            logger.warning("%s stays until the next sweep: %s", public_id, error)


def save_journal_lines(
    tenant_id: int, public_id: str, suffix: str, lines: bytes, *, replace: bool
) -> None:
    """Save a part of a batch's journal, whole lines, in the object storage.

    Args:
        replace: the part contains everything that was saved before, which is deleted.
    Raises: `ServiceUnavailable`.
    """
    folder = _object_name(tenant_id, public_id) + suffix
    _, earlier = object_storage.list_objects(folder) if replace else ([], [])
    with tempfile.NamedTemporaryFile(dir=tenant_dir(tenant_id), prefix=PARTIAL) as file:
        file.write(lines)
        file.flush()
        object_storage.upload_object(f"{folder}/{time.time_ns():020}", Path(file.name))
    for name in earlier:
        object_storage.delete_object(f"{folder}/{name}")


def saved_journal_lines(tenant_id: int, public_id: str, suffix: str) -> Iterator[bytes]:
    """The parts of a batch's journal, the oldest first. Raises `ServiceUnavailable`."""
    folder = _object_name(tenant_id, public_id) + suffix
    for name in object_storage.list_objects(folder)[1]:
        yield object_storage.read_object(f"{folder}/{name}")


def remove_saved_journal(tenant_id: int, public_id: str, suffix: str) -> None:
    """Remove all parts of a batch's journal. Raises `ServiceUnavailable`."""
    object_storage.delete_folder(_object_name(tenant_id, public_id) + suffix)


def remove_tenant_blobs(tenant_id: int) -> None:
    """Remove all files of a tenant, and the journals of its batches."""
    shutil.rmtree(tenant_dir(tenant_id), ignore_errors=True)
    if has_object_storage():
        object_storage.delete_folder(f"{FOLDER}/{int(tenant_id)}")


def delete_orphan_blobs(
    find_referenced: Callable[[set[str]], set[str]], older_than_s: float
) -> int:
    """Remove files without a row that weren't touched for `older_than_s` seconds.

    Args:
        find_referenced: of up to 500 public ids, returns those that a row refers to.

    Returns: number of removed files.
    """
    removed, limit = 0, time.time() - older_than_s
    for page in pages(path for path in files_dir().glob("*/*") if _is_older(path, limit)):
        # A partial file's name begins with a dot, so its id is "", which no row has.
        public_ids = {path: path.name.partition(".")[0] for path in page}
        referenced = find_referenced(set(public_ids.values()))
        for path, public_id in public_ids.items():
            if public_id not in referenced:
                path.unlink(missing_ok=True)
                removed += 1
    if has_object_storage():
        removed += _delete_orphan_objects(find_referenced, limit)
    return removed


def _delete_orphan_objects(find_referenced: Callable[[set[str]], set[str]], limit: float) -> int:
    removed = 0
    tenants, _ = object_storage.list_objects(FOLDER)
    for tenant in tenants:
        journals, files = object_storage.list_objects(f"{FOLDER}/{tenant}")
        for page in pages(iter([*files, *journals])):
            public_ids = {name: name.partition(".")[0] for name in page}
            referenced = find_referenced(set(public_ids.values()))
            for name in page:
                if public_ids[name] not in referenced:
                    removed += _delete_old_object(f"{FOLDER}/{tenant}/{name}", name in files, limit)
    return removed


def _delete_old_object(name: str, is_file: bool, limit: float) -> int:
    """Delete a file or a batch's journal unless it's younger than `limit`; returns how many."""
    if not is_file:
        _, saved = object_storage.list_objects(name)
        return sum(_delete_old_object(f"{name}/{part}", True, limit) for part in saved)
    try:
        if object_storage.modified_at(name).timestamp() >= limit:
            return 0
    except FileNotFoundError:  # another worker sweeps too
        return 0
    object_storage.delete_object(name)
    return 1


def _is_older(path: Path, limit: float) -> bool:
    try:
        return path.stat().st_mtime < limit
    except FileNotFoundError:  # removed meanwhile by its owner
        return False
