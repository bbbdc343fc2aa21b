"""Refused requests, however many come: the first of a kind one by one, the others as a number."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from metering.requests.rows import Served

#: Of one kind, in one process: so many a minute have a row of their own.
SINGLE = 10
WINDOW_S = 60.0
#: How old what stands for those without a row may be; it isn't made for each of hundreds a second.
LAST_EVERY_S = 1.0
#: With more kinds than that they're told apart by tenant and reason alone.
MOST_KINDS = 1000

Kind = tuple[int, int | None, str, int, str]


@dataclass(slots=True)
class _Window:
    began: float
    count: int = 0
    last: Served | None = None
    last_at: float = -math.inf


class Refusals:
    """Thins refusals out. `keep` gets what is to be written.

    A kind is a tenant, key, endpoint, status and code. So a flood of one kind takes `SINGLE` + 1
    rows a minute in each process.
    """

    def __init__(
        self, keep: Callable[[Served], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keep, self._clock = keep, clock
        self._lock = threading.Lock()
        self._windows: dict[Kind, _Window] = {}

    def note(self, kind: Kind, make: Callable[[], Served]) -> None:
        """One more was refused; `make` is called where it's to be kept. Any thread."""
        with self._lock:
            if kind not in self._windows and len(self._windows) >= MOST_KINDS:
                kind = (kind[0], None, "", *kind[3:])
            now = self._clock()
            window = self._windows.get(kind)
            if window is None or now - window.began >= WINDOW_S:
                self._end(window)
                window = self._windows[kind] = _Window(now)
            window.count += 1
            if window.count <= SINGLE:
                self._keep(make())
            elif now - window.last_at >= LAST_EVERY_S:
                window.last, window.last_at = make(), now

    def sweep(self, *, all_of_them: bool = False) -> None:
        """Tell of the kinds whose minute is over."""
        with self._lock:
            now = self._clock()
            for kind, window in list(self._windows.items()):
                if all_of_them or now - window.began >= WINDOW_S:
                    del self._windows[kind]
                    self._end(window)

    def _end(self, window: _Window | None) -> None:
        """One row for those that have none."""
        if window is not None and window.last is not None:
            last = window.last
            self._keep(Served(last.record, last.note, window.count - SINGLE))
