"""Work that outlives its request: usage that is being settled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

_running: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` on this loop without waiting for it."""
    task = asyncio.get_running_loop().create_task(work)
    _running.add(task)
    task.add_done_callback(_done)


def _done(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("Work in the background failed.", exc_info=error)


async def drain(timeout_s: float) -> None:
    """Wait for this loop's background work and what that spawns, for at most so long in all."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + timeout_s
    while mine := [task for task in _running if task.get_loop() is loop]:
        left = ends_at - loop.time()
        if left <= 0:
            return
        await asyncio.wait(mine, timeout=left)
