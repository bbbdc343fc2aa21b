"""A database with all tables, made once a run and copied: making one takes seconds of a core."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "quire.sqlite3"


def with_tables(data_dir: Path) -> Path:
    """`data_dir`, private and with a database in it that was just migrated, unless it has one.

    What a first start does to an empty folder is tested in test_up.py, which doesn't use this.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (data_dir / NAME).exists():
        (data_dir / NAME).touch(mode=0o600)
        (data_dir / NAME).write_bytes(_tables())
    return data_dir


@contextmanager
def once_a_run(code: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """A folder to copy from inside the block; whichever worker of this run asks first makes it.

    `code`: the file of what makes it, which is locked meanwhile. `make`: fills a folder that
    doesn't exist yet.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    folder = Path(tempfile.gettempdir()) / f"quire-{Path(code).stem}-{run}"
    with _locked(code):
        if not (folder / "made").exists():
            folder.mkdir(mode=0o700, exist_ok=True)
            atexit.register(_remove, code, folder)
            make(folder / "making")
            (folder / "making").rename(folder / "made")
        yield folder / "made"


def _remove(code: str, folder: Path) -> None:
    """When its maker ends, and nobody copies from it; who asks then makes it anew."""
    with _locked(code):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(code: str) -> Iterator[None]:
    with open(code) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _tables() -> bytes:
    with once_a_run(__file__, _migrate) as migrated:
        return (migrated / NAME).read_bytes()


def _migrate(folder: Path) -> None:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("DATABASE_")
    }
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "--verbosity", "0", "--skip-checks"],
        cwd=ROOT,
        env=environment | {"QUIRE_DATA_DIR": str(folder)},
        check=True,
        timeout=300,
    )
