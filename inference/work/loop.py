"""The event loop of a worker process: Celery's tasks hand their work to it and return at once."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from django.db import DatabaseError, InterfaceError

from inference.engine_client import close_engine_client
from inference.generation import background
from metering.keeper import start_keeper, stop_keeper
from metering.redis_clients import close_redis_link
from metering.requests.writer import start_writer, stop_writer
from storage.actions import owner_of
from tenants.db_threads import in_db_thread

logger = logging.getLogger(__name__)

Runner = Callable[[str, str], Awaitable[None]]
SETTLE_WITHIN_S = 5.0
LOOK_EVERY_S = 0.25


class WorkLoop:
    """Runs work by its kind and id, each at most once at a time.

    Args:
        runners: by kind, called with the id and this worker's name.
        limits: how many of a kind run at a time. What comes beyond stays in the database until a
            worker has room.
        waiting: by kind, the ids of what nobody works on, in the order of their turns. Asked when
            a piece of work ends, so that its place isn't empty until the next sweep.
    """

    def __init__(
        self,
        runners: dict[str, Runner],
        limits: dict[str, int],
        waiting: Mapping[str, Callable[[], list[str]]] | None = None,
    ) -> None:
        self.owner = owner_of(os.getpid()) + uuid.uuid4().hex[:12]
        self._runners, self._limits = runners, limits
        self._waiting = waiting or {}
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="quire-work", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        start_keeper()  # a worker lets requests in too
        start_writer()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self, kind: str, public_id: str) -> None:
        """Begin a piece of work unless it runs here or there's no room. From any thread."""
        if kind not in self._runners:
            raise ValueError(f"Unknown job kind {kind!r}.")
        self._loop.call_soon_threadsafe(self._start, kind, public_id)

    def _start(self, kind: str, public_id: str) -> None:
        name = (kind, public_id)
        busy = sum(running == kind for running, _ in self._running)
        if self._stopping or name in self._running or busy >= self._limits[kind]:
            return
        work = self._runners[kind](public_id, self.owner)
        task = self._loop.create_task(_coroutine(work), name=f"{kind} {public_id}")
        self._running[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: tuple[str, str], task: asyncio.Task[None]) -> None:
        self._running.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s %s failed; it's tried again", *name, exc_info=error)
        kind = name[0]
        if kind in self._waiting and kind not in self._looking and not self._stopping:
            self._looking[kind] = self._loop.create_task(self._look(kind))

    async def _look(self, kind: str) -> None:
        """Start what waits. At most once in `LOOK_EVERY_S`, for all that ended meanwhile."""
        await asyncio.sleep(LOOK_EVERY_S)
        self._looking.pop(kind)
        try:
            found = await in_db_thread(self._waiting[kind])
        except (DatabaseError, InterfaceError) as error:
            logger.warning("what waits was not read: %s", error)
            return
        for public_id in found:
            self._start(kind, public_id)

    def stop(self, timeout_s: float = 15.0) -> None:
        """Cancel what runs (another worker goes on with it), settle, write what became of requests,
        end, with every thread that this process has for letting requests in. Blocks.
        """
        if not self._thread.is_alive():
            return
        done = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        try:
            done.result(timeout_s)
        except TimeoutError:
            logger.warning("work was still running after %.0f s", timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        stop_keeper()
        stop_writer()

    async def _stop(self) -> None:
        self._stopping = True
        tasks = [*self._running.values(), *self._looking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close_engine_client()
        await background.drain(SETTLE_WITHIN_S)
        await close_redis_link()


async def _coroutine(work: Awaitable[Any] | Coroutine[Any, Any, Any]) -> None:
    await work
