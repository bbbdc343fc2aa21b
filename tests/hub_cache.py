"""Repositories as the hub's client caches them."""

from __future__ import annotations

import hashlib
from pathlib import Path


def cache_files(folder: Path, repository: Path, revision: str = "0a1b") -> Path:
    """Move a folder's files into `repository`; returns the snapshot, which holds links to them."""
    blobs, snapshot = repository / "blobs", repository / "snapshots" / revision
    for created in (blobs, snapshot, repository / "refs"):
        created.mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    for file in folder.iterdir():
        blob = hashlib.sha256(file.name.encode()).hexdigest()
        file.rename(blobs / blob)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob))
    return snapshot
