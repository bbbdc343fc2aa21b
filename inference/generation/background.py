"""Work that outlives its request, such as settling usage."""

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


def spawn(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on this loop without waiting for it."""
    task = asyncio.get_running_loop().create_task(coroutine)
    _running.add(task)
    task.add_done_callback(_done)


def _done(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("Work in the background failed.", exc_info=error)


async def drain(timeout_s: float) -> None:
    """Wait up to `timeout_s` seconds for this loop's background work and what that spawns."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while tasks := [task for task in _running if task.get_loop() is loop]:
        remaining = deadline - loop.time()
        if remaining <= 0:
            return
        await asyncio.wait(tasks, timeout=remaining)


#: Seconds between two checks of a running request's key.
RECHECK_KEY_S = 0.5


class KeyRevalidator:
    """Checks periodically, while a request runs, that its caller's key is still valid.

    Tokens never wait for the database. Each stream checks by itself, so that one reply doesn't
    wake all streams of a key in the same iteration of the event loop.

    Args:
        fail: called with the error when the caller is no longer allowed.
    """

    __slots__ = ("_caller", "_checked_at", "_fail")

    def __init__(self, caller: Caller, fail: Callable[[QuireError], None]) -> None:
        self._caller, self._fail = caller, fail
        self._checked_at = time.monotonic()

    def maybe_check(self) -> None:
        """Check if the last check was at least `RECHECK_KEY_S` seconds ago.

        Raises an error that is cached. An error from the database goes to `fail` later.
        """
        now = time.monotonic()
        if now - self._checked_at < RECHECK_KEY_S:
            return
        self._checked_at = now
        if not is_still_valid_cached(self._caller):
            spawn(self._check())

    async def _check(self) -> None:
        try:
            await check_still_valid(self._caller)
        except QuireError as error:
            self._fail(error)


#: With fewer tokens, freeing is immediate; freeing millions would block the event loop.
_MIN_TOKENS_FOR_DELAY = 100_000
#: Seconds after which nothing else refers to the prompts.
RELEASE_DELAY_S = 1.0


def release_prompts(prompts: list[list[int]]) -> None:
    """Free prompts that are no longer needed, a few at a time if they have many tokens."""
    if sum(map(len, prompts)) >= _MIN_TOKENS_FOR_DELAY:
        spawn(_free(list(prompts)))


async def _free(prompts: list[list[int]]) -> None:
    await asyncio.sleep(RELEASE_DELAY_S)
    async for _ in iterate_cooperatively(range(len(prompts))):
        prompts.pop()
