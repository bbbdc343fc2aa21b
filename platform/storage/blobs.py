"""Files' bytes on disk: one folder a tenant, names that the server made, nothing a client chose.

`<files dir>/<tenant's number>/<public id>`; a batch that runs keeps its journals beside them as
`<batch id>.output` and `<batch id>.errors`. Every gateway and worker must see the same folder.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from django.conf import settings

from common.db import pages
from common.errors import NotFound
from common.files import is_id

#: Temporary files of uploads begin with this.
PARTIAL = ".upload-"
CHUNK = 1 << 16


def files_dir() -> Path:
    """The folder of files, mode 0700."""
    folder = settings.QUIRE.files_dir
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def tenant_dir(tenant_id: int) -> Path:
    """A tenant's folder."""
    folder = files_dir() / str(int(tenant_id))
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def blob_path(tenant_id: int, public_id: str, suffix: str = "") -> Path:
    """A file's place. Raises `NotFound` for a text that can't be an id."""
    if not is_id(public_id):
        raise NotFound("File not found.")
    return tenant_dir(tenant_id) / f"{public_id}{suffix}"


def write_blob(tenant_id: int, public_id: str, chunks: Iterable[bytes]) -> int:
    """Write a file whole or not at all, mode 0600; return its size in bytes. Raises OSError."""
    target, size = blob_path(tenant_id, public_id), 0
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                size += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return size


def link_blob(tenant_id: int, public_id: str, source: Path) -> int:
    """Give a finished journal a file's name, keeping its own; return its size. Repeatable."""
    target = blob_path(tenant_id, public_id)
    target.unlink(missing_ok=True)
    os.link(source, target)
    return target.stat().st_size


def remove_blob(tenant_id: int, public_id: str, suffix: str = "") -> None:
    """Remove a file's bytes, if they are there."""
    blob_path(tenant_id, public_id, suffix).unlink(missing_ok=True)


def delete_orphan_blobs(
    find_referenced: Callable[[set[str]], set[str]], older_than_s: float
) -> int:
    """Remove files that no row refers to and nobody has touched for `older_than_s` seconds.

    Args:
        find_referenced: of up to 500 public ids, those that a row refers to.

    Returns: number of files that were removed.
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
    return removed


def _is_older(path: Path, limit: float) -> bool:
    try:
        return path.stat().st_mtime < limit
    except FileNotFoundError:  # removed meanwhile by whoever owns it
        return False
