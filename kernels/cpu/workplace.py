"""Folders that builds work in, and what killed ones left."""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "build-"
STALE_S = 3600.0
"""A folder that nobody holds and nothing was written to for so long is left over."""
_HELD = "held"

logger = logging.getLogger(__name__)


@contextmanager
def workplace(parent: Path) -> Iterator[Path]:
    """A new folder in `parent` until the block ends, held for as long as this process lives.

    What killed builds left beside it goes. Raises OSError where `parent` can't be written.
    """
    remove_stale(parent)
    with tempfile.TemporaryDirectory(dir=parent, prefix=PREFIX) as name:
        folder = Path(name)
        with (folder / _HELD).open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield folder


def remove_stale(parent: Path) -> None:
    """Remove folders of builds that have ended without doing so. Never raises."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or not folder.is_dir() or _age(folder) < STALE_S:
                continue
            if not _is_held(folder):
                logger.info("removing %s, left by a build that was ended", folder)
                shutil.rmtree(folder)
        except OSError as error:  # somebody else's, or another process was faster
            logger.debug("%s stays: %s", folder, error)


def _age(folder: Path) -> float:
    """Seconds since anything in it was written: compilers may outlive who started them."""
    written = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    return time.time() - max(written)


def _is_held(folder: Path) -> bool:
    """Whether its build runs. The system lets go of what a process held when it ends."""
    path = folder / _HELD
    if not path.exists():
        return False
    with path.open("r+") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
