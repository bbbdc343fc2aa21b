"""A running batch's results on disk: what is in a journal is done and is never done again."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


class JournalInUse(Exception):
    """Another process on this machine writes it."""


class Journal:
    """A file of JSON lines that outlives the worker that writes it.

    Opening it cuts off a line that a killed worker left half written. A lock, which the kernel lets
    go of when its holder dies, keeps a second writer out.

    Args:
        note: told of every line, of those that are there already too.
    Attributes:
        custom_ids: of the lines that are there.
    Raises:
        JournalInUse: somebody else writes it.
    """

    def __init__(self, path: Path, note: Callable[[dict[str, Any]], None]) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._file: IO[bytes] = os.fdopen(handle, "a+b")
        self.path, self._note = path, note
        self.custom_ids: set[str] = set()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise JournalInUse(str(path)) from None
        self._recover()

    def _recover(self) -> None:
        self._file.seek(0)
        whole = 0
        for raw in self._file:
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:  # what a machine that lost power left: no result
                line = None
            if not isinstance(line, dict):
                break
            self._take(line)
            whole += len(raw)
        self._file.truncate(whole)

    def _take(self, line: dict[str, Any]) -> None:
        self.custom_ids.add(line["custom_id"])
        self._note(line)

    def append(self, line: dict[str, Any]) -> None:
        """Add one line. It is the kernel's when this returns: killing the process loses nothing.

        Raises: OSError when the disk doesn't take it; then nothing of it is there.
        """
        left = memoryview(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        whole = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[os.write(self._file.fileno(), left) :]
        except OSError:
            os.ftruncate(self._file.fileno(), whole)
            raise
        self._take(line)

    def sync(self) -> None:
        """Have it on the disk: a machine that loses power loses nothing from before."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of file and lock."""
        self._file.close()
