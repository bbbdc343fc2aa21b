"""Threads and coroutines that run as long as their process.

An error that a loop doesn't expect would end it, and what it does would wait in silence. So it is
logged, counted, shown by `/health` for a while, and the loop begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable

from prometheus_client import Counter

logger = logging.getLogger(__name__)

RESTART_DELAY_S = 1.0
#: For so long `/health` shows a failure.
VISIBLE_FOR_S = 600.0

_FAILURES = Counter(
    "quire_loop_failures", "Unexpected errors after which a loop of a process began anew.", ["loop"]
)
_latest: dict[str, tuple[float, str]] = {}


def record_failure(name: str, error: Exception) -> None:
    """Log and count an error that the loop `name` goes on after. Any thread."""
    logger.error("%s failed and begins anew", name, exc_info=error)
    _FAILURES.labels(name).inc()
    _latest[name] = (time.monotonic(), type(error).__name__)


def failure_warnings() -> list[str]:
    """A sentence for each of this process's loops that failed in the last ten minutes."""
    now = time.monotonic()
    return [
        f"{name} failed {now - failed_at:.0f} s ago ({error}) and began anew: see the log."
        for name, (failed_at, error) in sorted(_latest.items())
        if now - failed_at < VISIBLE_FOR_S
    ]


class LoopThread(threading.Thread):
    """A daemon thread that runs `loop` until `stop`.

    Attributes:
        stopping: set when it shall end; `loop` returns soon then.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.stopping = threading.Event()

    def loop(self) -> None:
        """Body of the loop; called again after an unexpected error."""
        raise NotImplementedError

    def run(self) -> None:
        while True:
            try:
                self.loop()
                return
            except Exception as error:
                record_failure(self.name, error)
                if self.stopping.wait(RESTART_DELAY_S):
                    return

    def stop(self, timeout: float = 10.0) -> None:
        """Let it finish what is at hand, and end. Blocks for up to `timeout` seconds."""
        self.stopping.set()
        self.join(timeout)


async def keep_running(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine until it returns; begin anew after an unexpected error."""
    while True:
        try:
            await run()
            return
        except Exception as error:
            record_failure(name, error)
        await asyncio.sleep(RESTART_DELAY_S)
