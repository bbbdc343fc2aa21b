"""The event loop of a worker process: Celery's tasks hand their work to it and return at once."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import stamina.instrumentation
from django.conf import settings
from django.db import DatabaseError, InterfaceError
from redis.exceptions import RedisError
from stamina.instrumentation import RetryDetails

from common.db import run_in_db_thread
from common.log_context import bound_request, detached
from common.task_queue import BROKER_ERRORS, send_task
from inference.engine_client.client import close_engine_client
from inference.generation import background
from inference.tracing import current_traceparent, tracing
from metering.gateway_recovery import start_gateway_heartbeat, stop_keeper
from metering.redis_scripts import close_redis_link, redis_key, redis_link
from metering.request_log_writer import start_writer, stop_writer
from storage.actions import owner_of, release_lease, renew_lease

logger = logging.getLogger(__name__)

#: Maximum completion window, plus time for work that still waits after it.
KEEP_S = 3 * 24 * 3600


def _log_retry(details: RetryDetails) -> None:
    cause = details.caused_by
    logger.warning("%s is retried in %.1f s: %s", details.name, details.wait_for, cause)


# Stamina's own hook would log the arguments, which contain tenants' prompts.
stamina.instrumentation.set_on_retry_hooks([_log_retry])


def _name(public_id: str) -> str:
    return redis_key(f"origin:{public_id}")


async def save_trace_parent(public_id: str) -> None:
    """Store the running request's span for work that runs later, unless one is stored already.

    It stays in Redis while the work may run: if it is lost, the work's spans have no link.
    """
    parent = current_traceparent()
    if not parent:
        return
    try:
        await redis_link().execute("SET", _name(public_id), parent, "NX", "EX", str(KEEP_S))
    except RedisError as error:
        logger.warning("The spans of %s will have no link: %s", public_id, error)


async def load_trace_parent(public_id: str) -> str:
    """A `traceparent`; "" if none is stored, or tracing is off."""
    if tracing() is None:
        return ""
    try:
        traceparent = await redis_link().execute("GET", _name(public_id))
    except RedisError as error:
        logger.warning("The spans of %s have no link: %s", public_id, error)
        return ""
    return traceparent.decode() if traceparent else ""


def lease_seconds() -> float:
    """Seconds after which a silent worker loses its jobs to the next one that asks for them."""
    return settings.QUIRE.lease_seconds


class Lease:
    """Renews a claimed row's lease while the block runs, and releases it afterwards.

    The block is cancelled when the lease is lost, because another worker then owns the row.
    """

    def __init__(self, row: Any, owner: str) -> None:
        self._row, self._owner = row, owner
        self._lost = False

    async def __aenter__(self) -> Lease:
        self._task = asyncio.current_task()
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: Any) -> bool:
        self._keeper.cancel()
        if self._lost and self._task is not None:
            self._task.uncancel()
            return kind is not None and issubclass(kind, asyncio.CancelledError)
        # Must not be interrupted: no other worker could continue until the lease expires.
        await asyncio.shield(run_in_db_thread(release_lease, row=self._row, owner=self._owner))
        return False

    async def _keep(self) -> None:
        missed, lease_s = 0.0, lease_seconds()
        while missed < lease_s:
            await asyncio.sleep(lease_s / 6)
            try:
                is_leased = await run_in_db_thread(
                    renew_lease, row=self._row, owner=self._owner, seconds=lease_s
                )
            except Exception as error:  # any error means that the lease may not have been renewed
                missed += lease_s / 6
                logger.warning("the lease of %s was not renewed: %s", self._row, error)
                continue
            if not is_leased:
                break
            missed = 0.0
        logger.warning("the lease of %s is lost; its work ends here", self._row)
        self._lost = True
        if self._task is not None:
            self._task.cancel()


Runner = Callable[[str, str], Awaitable[None]]
SHUTDOWN_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.25


class JobRunner:
    """Runs work by its kind and id, each at most once at a time.

    Args:
        runners: by kind, called with the id and this worker's name.
        limits: maximum number of concurrent jobs by kind. Further ones stay in the database until a
            worker has capacity.
        waiting: by kind, returns the ids of unclaimed jobs in the order in which they should run.
            Called when a job ends, so that its slot isn't idle until the next sweep.
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
        start_gateway_heartbeat()  # a worker admits requests too
        start_writer()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self, kind: str, public_id: str) -> None:
        """Start a job unless it runs here already or there is no capacity. From any thread."""
        if kind not in self._runners:
            raise ValueError(f"Unknown job kind {kind!r}.")
        self._loop.call_soon_threadsafe(self._start, kind, public_id)

    def _start(self, kind: str, public_id: str) -> None:
        name = (kind, public_id)
        busy = sum(running == kind for running, _ in self._running)
        if self._stopping or name in self._running or busy >= self._limits[kind]:
            return
        with bound_request(request_id=public_id):
            work = self._runners[kind](public_id, self.owner)
            task = self._loop.create_task(_coroutine(work), name=f"{kind} {public_id}")
            self._running[name] = task
            task.add_done_callback(lambda done: self._on_job_done(name, done))

    def _on_job_done(self, name: tuple[str, str], task: asyncio.Task[None]) -> None:
        self._running.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s %s failed; it's tried again", *name, exc_info=error)
        kind = name[0]
        if kind in self._waiting and kind not in self._looking and not self._stopping:
            with detached():
                self._looking[kind] = self._loop.create_task(self._start_waiting(kind))

    async def _start_waiting(self, kind: str) -> None:
        """Start waiting jobs. At most once per `POLL_INTERVAL_S`, for all that ended meanwhile."""
        await asyncio.sleep(POLL_INTERVAL_S)
        self._looking.pop(kind)
        try:
            public_ids = await run_in_db_thread(self._waiting[kind])
        except (DatabaseError, InterfaceError) as error:
            logger.warning("what waits was not read: %s", error)
            return
        for public_id in public_ids:
            self._start(kind, public_id)

    def stop(self, timeout_s: float = 15.0) -> None:
        """Cancel running jobs (another worker continues them), settle, flush request logs, and stop
        all threads that this process uses to admit requests. Blocks.
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
        await background.drain(SHUTDOWN_TIMEOUT_S)
        await close_redis_link()


async def _coroutine(work: Awaitable[Any] | Coroutine[Any, Any, Any]) -> None:
    await work


RUN_TASK = "inference.run"


async def enqueue_job(kind: str, public_id: str) -> None:
    """Notify workers of a batch or a response. Without Redis they find it by themselves, later."""
    await save_trace_parent(public_id)
    try:
        await asyncio.to_thread(send_job, kind, public_id)
    except BROKER_ERRORS as error:
        logger.warning("%s %s waits for the next sweep: %s", kind, public_id, error)


def send_job(kind: str, public_id: str) -> None:
    """Send a job, blocking. Raises kombu's OperationalError when the broker can't be reached."""
    send_task(RUN_TASK, kind, public_id)
