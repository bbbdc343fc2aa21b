"""Threads for work that would block the event loop, shared fairly between tenants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, ParamSpec, TypeVar

from django.conf import settings

from common.db import with_time_limit
from engine.contract.errors import InvalidRequest
from inference.errors import Overloaded
from tenants.authentication import Caller

P = ParamSpec("P")
T = TypeVar("T")

#: Maximum number of jobs per thread that wait or run, of one tenant and of all.
TENANT_PER_THREAD, ALL_PER_THREAD = 64, 1024
MAX_IDLE_TENANTS = 1000


class FairThreadPool:
    """Runs jobs, always next of the tenant that has used the least thread time.

    Hundreds of one tenant's long prompts thus delay another tenant by no more than the running job.
    An idle tenant accumulates no credit.

    Args:
        jobs: name of the jobs in errors.
        tenant_per_thread: maximum number of a tenant's jobs per thread that wait or run; None:
            `TENANT_PER_THREAD`.
    """

    def __init__(
        self, threads: int, name: str, jobs: str, tenant_per_thread: int | None = None
    ) -> None:
        self._jobs_name = jobs
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._tenant_capacity = threads * (tenant_per_thread or TENANT_PER_THREAD)
        self._capacity = threads * ALL_PER_THREAD
        self._lock = threading.Lock()
        self._queues: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        #: Number of jobs that wait or run, by tenant.
        self._jobs: dict[str, int] = {}
        #: Thread seconds by tenant, starting from the level of the others when it arrived.
        self._served: dict[str, float] = {}

    def submit(self, tenant: str, job: Callable[[], T]) -> Future[T]:
        """Queue a job. A job that is cancelled while it waits isn't run.

        Raises:
            Overloaded: too many of the tenant's jobs, or of all, wait.
        """
        future: Future[T] = Future()
        with self._lock:
            count = self._jobs.get(tenant, 0)
            if count >= self._tenant_capacity or sum(self._jobs.values()) >= self._capacity:
                raise Overloaded(f"Too many {self._jobs_name} wait. Try again in a moment.")
            self._jobs[tenant] = count + 1
            if tenant not in self._queues:
                self._queues[tenant] = deque()
                self._open_queue(tenant)
            self._queues[tenant].append((future, job))
        # The thread that takes this runs whichever job is next by then.
        self._threads.submit(self._run_next)
        return future

    def _open_queue(self, tenant: str) -> None:
        """Start an idle tenant at the level of the others."""
        other_totals = [self._served.get(name, 0.0) for name in self._queues if name != tenant]
        floor = min(other_totals, default=max(self._served.values(), default=0.0))
        self._served[tenant] = max(self._served.get(tenant, 0.0), floor)

    def _run_next(self) -> None:
        with self._lock:
            tenant = min(self._queues, key=lambda name: self._served[name])
            queue = self._queues[tenant]
            future, job = queue.popleft()
            if not queue:
                del self._queues[tenant]
        started = time.perf_counter()
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._done(tenant, time.perf_counter() - started)

    def _done(self, tenant: str, seconds: float) -> None:
        with self._lock:
            self._served[tenant] += seconds
            self._jobs[tenant] -= 1
            if not self._jobs[tenant]:
                del self._jobs[tenant]
                if len(self._served) > MAX_IDLE_TENANTS:
                    self._served = {name: self._served[name] for name in self._jobs}


#: Work on more characters runs in a thread.
MAX_INLINE_CHARS = 128 * 1024


class RenderPool:
    """Renders short prompts on the event loop, long ones in threads, with a time limit.

    A job that exceeds its limit counts until its thread is free.
    """

    def __init__(self, threads: int) -> None:
        self._threads = FairThreadPool(threads, "quire-render", "prompts")

    async def run(
        self, tenant: str, chars: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call the function, on the event loop if the text is short.

        Args:
            tenant: the tenant whose thread time is used.
            chars: number of characters that the function processes.

        Raises:
            InvalidRequest: it took longer than `render_timeout_s`.
            Overloaded: too many jobs of the tenant wait.
        """
        quire = settings.QUIRE
        if chars <= quire.inline_render_chars:
            return function(*args, **kwargs)
        limit_s = quire.render_timeout_s
        return await self.run_in_thread(tenant, limit_s, function, *args, **kwargs)

    async def run_in_thread(
        self,
        tenant: str,
        limit_s: float,
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call the function in a thread, when it is the tenant's turn. Raises as `run` does."""
        job = self._threads.submit(tenant, partial(function, *args, **kwargs))
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            raise InvalidRequest(
                f"The prompt could not be rendered within {limit_s:g} s.", code="render_timeout"
            ) from None


#: Threads that render long prompts: while a large one runs, another tenant's has the second.
RENDER_THREADS = 2


@lru_cache(maxsize=1)
def get_render_pool() -> RenderPool:
    """This process's pool."""
    return RenderPool(RENDER_THREADS)


#: A few threads only for reports, searches and lists, shared fairly between tenants.
_report_threads = FairThreadPool(2, "quire-reports", "reports and lists")


async def in_report_thread(
    caller: Caller, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function that only reads the database, unless the client has left before it starts.

    Raises: `QueryTimeout` as `with_time_limit`; `Overloaded` when too many wait.
    """
    job = partial(with_time_limit, partial(function, *args, **kwargs))
    return await asyncio.wrap_future(_report_threads.submit(caller.tenant, job))
