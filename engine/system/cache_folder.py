"""The folder of `QUIRE_CACHE_DIR`, where all processes of a host share converted data."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """Return `QUIRE_CACHE_DIR`, by default `quire` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QUIRE_CACHE_DIR") or Path(base) / "quire")


@contextmanager
def cache_entry(destination: Path) -> Iterator[Path]:
    """Yield a path for a folder that becomes `destination`; other processes may create it, too."""
    workplace = destination.with_name(f"{destination.name}.{uuid.uuid4().hex}")
    try:
        yield workplace
        try:
            workplace.rename(destination)
        except OSError:
            if not destination.is_dir():
                raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
