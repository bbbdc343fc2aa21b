"""`JoinedThread`: for threads that run torch operators."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

#: Longer than a step or a piece of memory takes on any machine; an endless one isn't waited for.
_WAIT_S = 10.0

_running: dict[threading.Thread, Callable[[], object]] = {}


class JoinedThread(threading.Thread):
    """A daemon thread that the interpreter tells to end, and waits for, as it exits.

    The interpreter ends daemon threads as soon as they ask for its lock. Inside a torch operator
    that aborts the process: C++ can't unwind through a destructor that was taking the lock again.
    """

    def __init__(
        self, run: Callable[..., None], *args: Any, name: str, tell_end: Callable[[], object]
    ) -> None:
        """`run(*args)` returns soon after `tell_end()` was called."""
        super().__init__(target=run, args=args, name=name, daemon=True)
        self._tell_end = tell_end

    def run(self) -> None:
        """See `threading.Thread`."""
        _running[self] = self._tell_end
        try:
            super().run()
        finally:
            del _running[self]


@atexit.register
def _join_all() -> None:
    for thread, tell_end in list(_running.items()):
        tell_end()
        thread.join(_WAIT_S)
