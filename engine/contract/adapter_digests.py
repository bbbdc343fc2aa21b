"""Digests of adapters by the state of their files: what this process has hashed it needn't hash
again while nothing is written there. Torch-free.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from pathlib import Path

from engine.contract.adapters import adapter_digest, adapter_files, tokenizer_digest

#: Of each file name, inode, size, and when its content and its entry changed last.
FileStates = tuple[tuple[str, int, int, int, int], ...]

#: Adapters that are remembered.
_MOST = 4096
#: A file system's clock moves in ticks: who writes twice within one leaves no trace of the second.
#: Files that were written so lately are hashed again.
_TICK_S = 0.1


def file_states(path: Path) -> FileStates:
    """Changes whenever one of the adapter's files is written or replaced. Raises OSError."""
    stats = [(file.name, file.stat()) for file in adapter_files(path)]
    return tuple(
        (name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for name, stat in stats
    )


class KnownDigests:
    """Of adapters and of their tokenizers, by path. Any thread may ask."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, tuple[FileStates, str, str]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> tuple[str, str]:
        """The digests of what is there now. Raises as `adapter_digest`."""
        states = file_states(path)
        found = self.known(path, states)
        if found is None:
            found = adapter_digest(path), tokenizer_digest(path)
            self.note(path, states, *found)
        return found

    def known(self, path: Path, states: FileStates) -> tuple[str, str] | None:
        """The digests of files in this state; None where nobody has hashed them."""
        with self._lock:
            found = self._known.get(path)
            if found is None or found[0] != states:
                return None
            self._known.move_to_end(path)
            return found[1:]

    def note(self, path: Path, states: FileStates, digest: str, tokenizer: str) -> None:
        """Files that were in this state before they were read, and are still, have these."""
        written = max((max(state[3:]) for state in states), default=0)
        if file_states(path) != states or time.time_ns() - written < _TICK_S * 1e9:
            return
        with self._lock:
            self._known[path] = states, digest, tokenizer
            self._known.move_to_end(path)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)


#: This process's.
known_digests = KnownDigests()
