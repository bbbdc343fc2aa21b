"""Adapters on disk, by the digest of their content: `<adapters dir>/<digest>/`.

What stands under a digest was complete before it got its name, and never changes. Gateways,
workers and replicas must all see the same folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

from django.conf import settings
from django.db.models import Sum

from adapters.models import AdapterUpload, AdapterVersion
from common.db import pages
from common.errors import AdapterTooLarge
from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from tenants.models import Tenant

#: The code of what is refused because of what a tenant keeps already.
FULL = "adapter_storage_full"


def max_adapter_bytes() -> int:
    """Bytes that one adapter may have."""
    return settings.QUIRE.max_adapter_bytes


def max_tenant_adapter_bytes() -> int:
    """Bytes that all of a tenant's may have together; 0 is no limit."""
    return settings.QUIRE.tenant_quotas.adapter_bytes


def used_bytes(tenant: Tenant) -> int:
    """Bytes of all versions, and of the uploads under way."""
    stored = AdapterVersion.objects.filter(adapter__tenant=tenant).aggregate(sum=Sum("num_bytes"))
    coming = AdapterUpload.objects.filter(tenant=tenant)
    return int(stored["sum"] or 0) + int(coming.aggregate(sum=Sum("num_bytes"))["sum"] or 0)


def check(tenant: Tenant | None, size: int) -> None:
    """Raise `AdapterTooLarge` when there's no room for so many bytes more.

    In a transaction: the tenant's row is locked, so that two can't both take the last room.
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


#: Folders and files that are being made or taken away begin with this.
STAGING = ".staging-"
GGUF_FILE = "adapter.gguf"
_DIGEST_CHARS = 64


def adapters_dir() -> Path:
    """The folder of adapters, mode 0700."""
    folder = settings.QUIRE.adapters_dir
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def staging_dir() -> Path:
    """A new empty folder on the store's file system."""
    return Path(tempfile.mkdtemp(dir=adapters_dir(), prefix=STAGING))


def content_path(digest: str) -> Path:
    """The path that a replica loads: PEFT's folder, or the GGUF file."""
    folder = adapters_dir() / digest
    gguf = folder / GGUF_FILE
    return gguf if gguf.is_file() else folder


def store_content(staged: Path) -> tuple[str, int]:
    """Move a staged folder under its digest; the digest and the size in bytes.

    A folder that has it already stays, and the staged one goes. Raises OSError, `InvalidRequest`.
    """
    gguf = staged / GGUF_FILE
    digest = adapter_digest(gguf if gguf.is_file() else staged)
    size = size_of(staged)
    for file in staged.iterdir():
        _sync(file)
    target = adapters_dir() / digest
    try:
        os.replace(staged, target)
        _sync(target.parent)
    except OSError:
        if not target.is_dir():
            raise
        os.utime(target)  # a sweep that is about to take it away sees that it's wanted again
        shutil.rmtree(staged)
    return digest, size


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def has_content(digest: str) -> bool:
    """Whether the content is there."""
    path = content_path(digest)
    return path.is_file() or all((path / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))


def delete_orphans(
    find_referenced: Callable[[Collection[str]], set[str]], older_than_s: float
) -> int:
    """Remove content that no version speaks of and nobody touched for so long; how many folders.

    `find_referenced` returns those of up to 500 digests that a version has.

    Requests that began with a version may still need its content when its row has gone.
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
        # Away from their names first: a version made in this moment is seen, and gets them back.
        referenced = find_referenced([folder.name for folder in aside])
        for folder, moved in aside.items():
            if folder.name in referenced and not folder.exists():
                os.replace(moved / "content", folder)
                moved.rmdir()
            else:
                shutil.rmtree(moved)
                removed += 1
    return removed


def _is_removable(folder: Path, limit: float) -> bool:
    """Whether it is content or staged, and untouched since `limit`, seconds since the epoch."""
    if not folder.name.startswith(STAGING) and len(folder.name) != _DIGEST_CHARS:
        return False
    try:
        return folder.stat().st_mtime < limit
    except FileNotFoundError:  # another worker sweeps too
        return False


def mark_used(digest: str) -> None:
    """Let `delete_orphans` wait from now on, if the content is there."""
    folder = adapters_dir() / digest
    if digest and folder.is_dir():
        os.utime(folder)


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
