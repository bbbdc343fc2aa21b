"""How much of a checkpoint's weights has been read, for whoever watches the load."""

from __future__ import annotations

from engine.contract.loading import READING, note


class ReadTally:
    """Tells who watches the load how many of the weights' bytes have been asked for."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._names: set[str] = set()
        note(READING, 0, total)

    def add(self, name: str, size: int) -> None:
        """A tensor is being read; twice counts once."""
        if name not in self._names:
            self._names.add(name)
            self._done += size
            note(READING, self._done, self._total)
