"""Work that outlives its request: usage that is being settled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from engine.contract.errors import QuireError
from inference.loop.fair_dispatch import iterate_cooperatively
from tenants.authentication import Caller, check_still_valid, is_still_valid_cached

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


# -- `KeyRevalidator`: whether whoever asked may still ask, looked at again while the answer runs.


#: How often a running request's key is looked at again.
RECHECK_KEY_S = 0.5


class KeyRevalidator:
    """Of one request. No token waits for what the database says of its key, nor do all of a key's
    streams go on in one turn of the loop when it has spoken.

    Args:
        caller: who asked. fail: told the error when they aren't let in any more.
    """

    __slots__ = ("_caller", "_checked_at", "_fail")

    def __init__(self, caller: Caller, fail: Callable[[QuireError], None]) -> None:
        self._caller, self._fail = caller, fail
        self._checked_at = time.monotonic()

    def maybe_check(self) -> None:
        """Look, every `RECHECK_KEY_S` seconds.

        Raises what is known to be wrong. What must be asked for is told to `fail`, soon.
        """
        now = time.monotonic()
        if now - self._checked_at < RECHECK_KEY_S:
            return
        self._checked_at = now
        if not is_still_valid_cached(self._caller):
            spawn(self._ask())

    async def _ask(self) -> None:
        try:
            await check_still_valid(self._caller)
        except QuireError as error:
            self._fail(error)


# -- The end of millions of prompt tokens: freed at once they'd keep the event loop.


#: Fewer tokens than that are freed at once.
_MIN_TOKENS_FOR_DELAY = 100_000
#: By when whoever else had them has let go.
RELEASE_INTERVAL_S = 1.0


def release_prompts(prompts: list[list[int]]) -> None:
    """Have what nobody needs any more freed a few prompts at a time."""
    if sum(map(len, prompts)) >= _MIN_TOKENS_FOR_DELAY:
        spawn(_free(list(prompts)))


async def _free(held: list[list[int]]) -> None:
    await asyncio.sleep(RELEASE_INTERVAL_S)
    async for _ in iterate_cooperatively(range(len(held))):
        held.pop()
