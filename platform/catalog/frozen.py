"""Ending what a signal (SIGSTOP) has frozen, whatever those who started it wait for.

A process that stands still may hold the database's write lock, and then the loop that looks after
it waits for that lock. So who looks for such processes is a thread that asks the kernel alone.
"""

from __future__ import annotations

import logging
import threading
import time

from catalog.processes import ManagedProcess

logger = logging.getLogger(__name__)

#: Frozen for so long, a process is killed: its clients' streams go on elsewhere.
FROZEN_AFTER_S = 1.0
LOOK_EVERY_S = 0.2


class FrozenWatch(threading.Thread):
    """Looks at processes until they have ended."""

    def __init__(self) -> None:
        super().__init__(name="quire-frozen", daemon=True)
        self._lock = threading.Lock()
        self._since: dict[ManagedProcess, float | None] = {}

    def add(self, process: ManagedProcess) -> None:
        """Look at this one too. Any thread."""
        with self._lock:
            self._since[process] = None
            if self.ident is None:
                self.start()

    def run(self) -> None:
        """Look for ever."""
        while True:
            time.sleep(LOOK_EVERY_S)
            with self._lock:
                self._since = {p: at for p, at in self._since.items() if not p.reaped}
                looked_at = list(self._since)
            for process in looked_at:
                since = self._look(process, self._since.get(process))
                with self._lock:
                    self._since[process] = since

    @staticmethod
    def _look(process: ManagedProcess, since: float | None) -> float | None:
        """Since when it stands still; None: it runs."""
        if not process.is_stopped():
            return None
        now = time.monotonic()
        if since is not None and now - since >= FROZEN_AFTER_S and process.end_frozen():
            logger.error("%s was frozen by a signal and killed", process.name)
        return now if since is None else since


_watch = FrozenWatch()


def end_when_frozen(process: ManagedProcess) -> None:
    """Kill it, and its group, once a signal has frozen it; its `was_frozen` says so then."""
    _watch.add(process)
