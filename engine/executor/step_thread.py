"""`StepThread`: runs steps one after the other while the engine prepares the next."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.devices.joined_thread import JoinedThread


class StepSkipped(RuntimeError):
    """A step wasn't run, because the one before it failed."""


@dataclass(slots=True)
class _Work:
    run: Callable[[], Any]
    future: Future[Any]
    attempt: int


class StepThread:
    """A thread that runs what is submitted, in order.

    A step builds on the one before. So once one has failed, all that was or is submitted after it
    is skipped, until `resume`.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._attempt = 0
        self._broken = False
        tell_end = partial(self._queue.put, None)
        self._thread = JoinedThread(_run_all, self._queue, name="steps", tell_end=tell_end)
        self._thread.start()
        # The thread holds neither this object nor, between steps, whoever submits them: its end is
        # theirs.
        self._end = weakref.finalize(self, tell_end)

    @property
    def alive(self) -> bool:
        """Whether it runs what is submitted."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Let the thread end after what was submitted."""
        self._end()

    def submit(self, prepare: Callable[[], Callable[[], Any]]) -> Future[Any]:
        """Call `prepare` here and now, and what it returns in the thread, after earlier steps."""
        future: Future[Any] = Future()
        if self._broken:
            future.set_exception(StepSkipped("An earlier step failed."))
            return future
        try:
            run = prepare()
        except Exception as error:  # whatever the model's inputs run into; the engine takes it back
            self._broken = True
            future.set_exception(error)
            return future
        self._queue.put(_Work(run, future, self._attempt))
        return future

    def resume(self) -> None:
        """Run again what is submitted from now on. Everything submitted before must be done."""
        self._attempt += 1
        self._broken = False


def _run_all(work: queue.SimpleQueue[_Work | None]) -> None:
    failed = -1
    while (item := work.get()) is not None:
        if item.attempt <= failed:
            item.future.set_exception(StepSkipped("An earlier step failed."))
            continue
        try:
            item.future.set_result(item.run())
        except BaseException as error:
            failed = item.attempt
            item.future.set_exception(error)
        # Lest it live until the next step comes.
        del item
