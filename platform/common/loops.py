"""Threads and coroutines that run as long as their process.

An unexpected error would end a loop, and its work would silently stop. So the error is logged,
counted and shown by `/health` for a while, and the loop restarts.
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
#: How long `/health` shows a failure.
VISIBLE_FOR_S = 600.0

_FAILURES = Counter(
    "quire_loop_failures", "Unexpected errors after which a loop of a process began anew.", ["loop"]
)
_latest: dict[str, tuple[float, str]] = {}


def record_failure(name: str, error: Exception) -> None:
    """Log and count an error after which the loop `name` continues. Thread-safe."""
    logger.error("%s failed and begins anew", name, exc_info=error)
    _FAILURES.labels(name).inc()
    _latest[name] = (time.monotonic(), type(error).__name__)


def failure_warnings() -> list[str]:
    """A sentence for each of this process's loops that failed within `VISIBLE_FOR_S`."""
    now = time.monotonic()
    return [
        f"{name} failed {now - failed_at:.0f} s ago ({error}) and began anew: see the log."
        for name, (failed_at, error) in sorted(_latest.items())
        if now - failed_at < VISIBLE_FOR_S
    ]


class LoopThread(threading.Thread):
    """A daemon thread that runs `loop` until `stop`.

    Attributes:
        stopping: set when it should end; `loop` returns soon after.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.stopping = threading.Event()

    def loop(self) -> None:
        """Body of the loop; restarted after an unexpected error."""
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
        """Let it finish its current work, and end. Blocks for up to `timeout` seconds."""
        self.stopping.set()
        self.join(timeout)


async def keep_running(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine until it returns; restart it after an unexpected error."""
    while True:
        try:
            await run()
            return
        except Exception as error:
            record_failure(name, error)
        await asyncio.sleep(RESTART_DELAY_S)
