"""Adapters on disk, by the digest of their content: `<adapters dir>/<digest>/`.

The content of a digest's folder is complete before it gets this name, and never changes. Gateways,
workers and replicas must all share the same folder.

With an object storage an adapter is an archive `adapters/<digest>/<random>.tar`, and the folder is
this machine's cache. Storing an adapter writes a new object unless a recent one exists, so that a
sweep, which deletes old objects, can't remove it.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from django.conf import settings
from django.db.models import Sum

from adapters.models import AdapterUpload, AdapterVersion
from common import object_storage
from common.db import pages
from common.errors import AdapterTooLarge, ServiceUnavailable
from common.object_storage import OnBytes, has_object_storage
from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from tenants.models import Tenant

#: Error code if the storage quota of a tenant is exhausted.
FULL = "adapter_storage_full"


def max_adapter_bytes() -> int:
    """Maximum bytes of one adapter."""
    return settings.QUIRE.max_adapter_bytes


def max_tenant_adapter_bytes() -> int:
    """Maximum bytes of all adapters of a tenant; 0 means no limit."""
    return settings.QUIRE.tenant_quotas.adapter_bytes


def used_bytes(tenant: Tenant) -> int:
    """Bytes of a tenant's versions and uploads in progress."""
    stored = AdapterVersion.objects.filter(adapter__tenant=tenant).aggregate(sum=Sum("num_bytes"))
    coming = AdapterUpload.objects.filter(tenant=tenant)
    return int(stored["sum"] or 0) + int(coming.aggregate(sum=Sum("num_bytes"))["sum"] or 0)


def check(tenant: Tenant | None, size: int) -> None:
    """Raise `AdapterTooLarge` if `size` more bytes exceed a limit.

    Call in a transaction: it locks the tenant's row, so that two uploads can't both use the last
    of the quota.
    """
    if size > max_adapter_bytes():
        raise AdapterTooLarge(
            f"The adapter has {size} bytes; at most {max_adapter_bytes()} are allowed.",
            param="files",
        )
    if tenant is None or not max_tenant_adapter_bytes():
        return
    Tenant.objects.select_for_update().get(pk=tenant.pk)
    used = used_bytes(tenant)
    if used + size > max_tenant_adapter_bytes():
        raise AdapterTooLarge(
            f"{tenant} may keep {max_tenant_adapter_bytes()} bytes of adapters and has {used}: "
            "delete a version first.",
            param="files",
            code=FULL,
        )


#: Prefix of folders and files that are being written or removed.
STAGING = ".staging-"
GGUF_FILE = "adapter.gguf"
_DIGEST_CHARS = 64
#: Folder in the object storage.
OBJECTS = "adapters"
_ARCHIVE = ".tar"
#: Object in a digest's folder, written when a version is deleted.
_USED = "used"
#: Seconds for which a copy is kept regardless of the cache's budget: its user may still open it.
_IN_USE_S = 60.0
#: Seconds after which staged files belong to a killed process, and an object may be deleted by a
#: sweep: no transfer takes that long.
_ABANDONED_S = 3600.0


def adapters_dir() -> Path:
    """The folder of adapters, mode 0700."""
    folder = settings.QUIRE.adapters_dir
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def staging_dir() -> Path:
    """Create an empty folder on the store's file system."""
    return Path(tempfile.mkdtemp(dir=adapters_dir(), prefix=STAGING))


def content_path(digest: str) -> Path:
    """Return the path that a replica loads: PEFT's folder, or the GGUF file.

    With an object storage it may not exist yet, see `fetch_content`.
    """
    folder = adapters_dir() / digest
    gguf = folder / GGUF_FILE
    return gguf if gguf.is_file() else folder


def store_content(staged: Path, on_bytes: OnBytes | None = None) -> tuple[str, int]:
    """Move a staged folder to the path of its digest; return the digest and the size in bytes.

    `on_bytes`: called with the sizes of chunks as they are sent to the object storage.
    If the digest exists already, the staged folder is removed. Raises OSError, `InvalidRequest`,
    `ServiceUnavailable`.
    """
    digest, size = _digest_of(staged), size_of(staged)
    for file in staged.iterdir():
        _sync(file)
    if has_object_storage():
        _upload(digest, staged, on_bytes)
    _move_to_digest(staged, digest)
    if has_object_storage():
        _trim_copies()
    return digest, size


def transfer_progress(source: Path, on_progress: Callable[[float], None]) -> OnBytes:
    """Turn chunk sizes into the fraction of an adapter that has been copied and uploaded."""
    files = [source] if source.is_file() else [file for file in source.iterdir() if file.is_file()]
    num_bytes, total_bytes = 0, sum(file.stat().st_size for file in files)
    total_bytes *= 2 if has_object_storage() else 1

    def add(chunk_bytes: int) -> None:
        nonlocal num_bytes
        num_bytes += chunk_bytes
        on_progress(min(1.0, num_bytes / max(1, total_bytes)))

    return add


def fetch_content(digest: str) -> Path:
    """Download the content if this machine lacks it; return its `content_path`. Blocks.

    Raises FileNotFoundError, OSError, `ServiceUnavailable`.
    """
    if has_object_storage() and not _has_copy(digest):
        _download(digest)
        _trim_copies()
    touch_copy(digest)
    return content_path(digest)


def touch_copy(digest: str) -> None:
    """Mark the content, if present, as recently used in this machine's cache."""
    with suppress(FileNotFoundError):
        os.utime(adapters_dir() / digest)


def _digest_of(folder: Path) -> str:
    gguf = folder / GGUF_FILE
    return adapter_digest(gguf if gguf.is_file() else folder)


def _move_to_digest(staged: Path, digest: str) -> None:
    target = adapters_dir() / digest
    try:
        os.replace(staged, target)
        _sync(target.parent)
    except OSError:
        if not target.is_dir():
            raise
        os.utime(target)  # tells a concurrent sweep that it is in use again
        shutil.rmtree(staged)


def _upload(digest: str, staged: Path, on_bytes: OnBytes | None) -> None:
    """Upload a folder as one object, atomically, replacing old ones."""
    ages = {}
    for name in _archives(digest):
        with suppress(FileNotFoundError):  # a concurrent sweep may delete it
            ages[name] = time.time() - object_storage.modified_at(name).timestamp()
    if any(age < _ABANDONED_S / 2 for age in ages.values()):
        return
    with tempfile.NamedTemporaryFile(dir=adapters_dir(), prefix=STAGING) as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for path in sorted(staged.iterdir()):
                archive.add(path, path.name)
        file.flush()
        name = f"{OBJECTS}/{digest}/{uuid4().hex}{_ARCHIVE}"
        object_storage.upload_object(name, Path(file.name), on_bytes)
    for name, age in ages.items():
        if age > _ABANDONED_S:
            object_storage.delete_object(name)


def _download(digest: str) -> None:
    archives = _archives(digest)
    if not archives:
        raise FileNotFoundError(f"The adapter {digest[:12]} isn't in the object storage.")
    staged = staging_dir()  # contains everything, so that `_trim_copies` finds it after a crash
    content, file = staged / "content", staged / "archive"
    content.mkdir(mode=0o700)
    try:
        object_storage.download_object(archives[0], file)
        with tarfile.open(file) as archive:
            archive.extractall(content, filter="data")
        if _digest_of(content) != digest:
            raise ServiceUnavailable(f"The object of the adapter {digest[:12]} is damaged.")
        _move_to_digest(content, digest)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _archives(digest: str) -> list[str]:
    folder = f"{OBJECTS}/{digest}"
    names = object_storage.list_objects(folder)[1]
    return [f"{folder}/{name}" for name in names if name.endswith(_ARCHIVE)]


def _trim_copies() -> None:
    """Remove the least recently used copies until the rest fits, and the leftovers of killed
    processes."""
    copies, abandoned = [], time.time() - _ABANDONED_S
    for folder in adapters_dir().iterdir():
        if folder.name.startswith(STAGING) and _is_removable(folder, abandoned):
            if folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                folder.unlink(missing_ok=True)
        elif len(folder.name) == _DIGEST_CHARS:
            with suppress(FileNotFoundError):  # another process may be trimming too
                copies.append((folder.stat().st_mtime, size_of(folder), folder))
    total = sum(size for _, size, _ in copies)
    for used_at, size, folder in sorted(copies):
        too_young = time.time() - used_at < _IN_USE_S
        if total <= settings.QUIRE.object_cache_bytes or too_young:
            return
        if (moved := _move_aside(folder)) is not None:
            shutil.rmtree(moved)
        total -= size


def size_of(folder: Path) -> int:
    """Return the total bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def has_content(digest: str) -> bool:
    """Return whether the content exists. Raises `ServiceUnavailable`."""
    return bool(_archives(digest)) if has_object_storage() else _has_copy(digest)


def _has_copy(digest: str) -> bool:
    path = content_path(digest)
    return path.is_file() or all((path / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))


def delete_orphans(
    find_referenced: Callable[[Collection[str]], set[str]], older_than_s: float
) -> int:
    """Remove content that no version references and that hasn't been used for `older_than_s`;
    return the number of folders.

    `find_referenced` returns those of up to 500 digests that a version references.

    The delay exists because requests that started with a version may need its content after its
    row was deleted.
    """
    removed, limit = 0, time.time() - older_than_s
    folders = (folder for folder in adapters_dir().iterdir() if _is_removable(folder, limit))
    for page in pages(folders):
        referenced = find_referenced([folder.name for folder in page])
        aside = {
            folder: moved
            for folder in page
            if folder.name not in referenced and (moved := _move_aside(folder))
        }
        # Move them aside first: if a version was just created, the second query finds it.
        referenced = find_referenced([folder.name for folder in aside])
        for folder, moved in aside.items():
            if folder.name in referenced and not folder.exists():
                os.replace(moved / "content", folder)
                moved.rmdir()
            else:
                shutil.rmtree(moved)
                removed += 1
    return removed + (_delete_orphan_objects(find_referenced, limit) if has_object_storage() else 0)


def _delete_orphan_objects(
    find_referenced: Callable[[Collection[str]], set[str]], limit: float
) -> int:
    removed = 0
    for page in pages(iter(object_storage.list_objects(OBJECTS)[0])):
        referenced = find_referenced(page)
        for digest in page:
            if digest not in referenced:
                removed += _delete_old_objects(f"{OBJECTS}/{digest}", limit)
    return removed


def _delete_old_objects(folder: str, limit: float) -> int:
    """Delete a digest's objects if all are older than `limit`; return 1 if so, else 0."""
    names = [f"{folder}/{name}" for name in object_storage.list_objects(folder)[1]]
    try:
        if any(object_storage.modified_at(name).timestamp() >= limit for name in names):
            return 0
    except FileNotFoundError:  # another worker is sweeping too
        return 0
    for name in names:  # not the objects written since the listing
        object_storage.delete_object(name)
    return 1


def _is_removable(folder: Path, limit: float) -> bool:
    """Return whether it is content or staged, and unused since `limit` (seconds since 1970)."""
    if not folder.name.startswith(STAGING) and len(folder.name) != _DIGEST_CHARS:
        return False
    try:
        return folder.stat().st_mtime < limit
    except FileNotFoundError:  # another worker is sweeping too
        return False


def mark_used(digest: str) -> None:
    """Restart the delay of `delete_orphans` for the content, if it exists.

    Raises `ServiceUnavailable`.
    """
    if digest:
        touch_copy(digest)
        if has_object_storage():
            with tempfile.NamedTemporaryFile(dir=adapters_dir(), prefix=STAGING) as file:
                object_storage.upload_object(f"{OBJECTS}/{digest}/{_USED}", Path(file.name))


def _move_aside(folder: Path) -> Path | None:
    """Move the content aside; return its new path, or None if another worker has moved it."""
    aside = staging_dir()
    try:
        os.replace(folder, aside / "content")
    except FileNotFoundError:
        aside.rmdir()
        return None
    return aside


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
