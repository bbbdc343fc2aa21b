"""Spreads work that is due at once over iterations of the event loop, tenant by tenant.

Two hundred requests of one tenant that start or end together block the loop for hundreds of
milliseconds, and the tokens of as many streams for tens. Another tenant's request would wait for
all of them in each iteration that it needs until its first token is sent. With a dispatcher it
doesn't even wait for the next iteration: a tenant without waiting work proceeds at once.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary


class Waiter(Protocol):
    """The methods of a future that a dispatcher uses."""

    def done(self) -> bool:
        """Whether it was cancelled or has its result."""

    def set_result(self, result: None, /) -> None:
        """Let it proceed."""


class FairDispatcher:
    """Lets waiters proceed. All methods are called on one event loop.

    Args:
        max_per_turn: waiters that proceed per iteration of the loop. The first waiters of tenants
            in that iteration may be as many again.
        lower_priority, max_when_busy: limit while waiters queue at that dispatcher, whose
            iterations are long.
    """

    def __init__(
        self,
        max_per_turn: int,
        lower_priority: FairDispatcher | None = None,
        max_when_busy: int = 0,
    ) -> None:
        self._max_per_turn = self._num_remaining = self._num_extra = max_per_turn
        self._lower_priority, self._max_when_busy = lower_priority, max_when_busy
        self._queues: OrderedDict[str, deque[Waiter]] = OrderedDict()
        #: Tenants that proceeded in this iteration.
        self._served_tenants: set[str] = set()
        self._counting = False

    def admit(self, tenant: str, waiter: Waiter) -> None:
        """Set the waiter's result: now, unless several came before it in this iteration."""
        if not self._counting:
            self._counting = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._next_turn, loop)
        if self._admit_now(tenant):
            waiter.set_result(None)
        else:
            self._queues.setdefault(tenant, deque()).append(waiter)

    def _admit_now(self, tenant: str) -> bool:
        """Whether a waiter proceeds at once, which is then counted."""
        if self._num_remaining and not self._queues:
            self._num_remaining -= 1
        elif self._num_extra and tenant not in self._served_tenants and tenant not in self._queues:
            self._num_extra -= 1
        else:
            return False
        self._served_tenants.add(tenant)
        return True

    async def wait(self, tenant: str) -> None:
        """Return in the caller's turn."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.admit(tenant, waiter)
        if not waiter.done():
            await waiter

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_remaining = self._num_extra = self._max_per_turn
        if self._lower_priority is not None and self._lower_priority._queues:
            self._num_remaining = self._max_when_busy
        self._served_tenants.clear()
        while self._num_remaining and self._queues:
            tenant, queue = self._queues.popitem(last=False)
            waiter = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # to the end of the rotation
            if not waiter.done():
                waiter.set_result(None)
                self._served_tenants.add(tenant)
                self._num_remaining -= 1
        self._counting = bool(self._served_tenants or self._queues)
        if self._counting:
            loop.call_soon(self._next_turn, loop)


class LoopFairDispatcher:
    """A `FairDispatcher` for each event loop."""

    def __init__(
        self,
        max_per_turn: int,
        lower_priority: LoopFairDispatcher | None = None,
        max_when_busy: int = 0,
    ) -> None:
        self._max_per_turn = max_per_turn
        self._lower_priority, self._max_when_busy = lower_priority, max_when_busy
        self._dispatchers: WeakKeyDictionary[asyncio.AbstractEventLoop, FairDispatcher] = (
            WeakKeyDictionary()
        )
        self._last: tuple[Callable[[], object], FairDispatcher] | None = None

    def current(self) -> FairDispatcher:
        """The running loop's dispatcher."""
        loop = asyncio.get_running_loop()
        # Called for every token: the lookup takes as long as the dispatch.
        if self._last is not None and self._last[0]() is loop:
            return self._last[1]
        dispatcher = self._dispatchers.get(loop)
        if dispatcher is None:
            lower = None if self._lower_priority is None else self._lower_priority.current()
            dispatcher = FairDispatcher(self._max_per_turn, lower, self._max_when_busy)
            self._dispatchers[loop] = dispatcher
        self._last = weakref.ref(loop), dispatcher
        return dispatcher


#: Requests that start (a millisecond or two each), and requests that end.
start_dispatch, finish_dispatch = LoopFairDispatcher(1), LoopFairDispatcher(4)
#: Streams with new tokens. Fewer while requests wait to start: other streams' tokens are merged
#: meanwhile, which leaves more time for those requests.
wake_dispatch = LoopFairDispatcher(16, start_dispatch, 6)
#: Requests that are rejected before they are parsed.
rejection_dispatch = LoopFairDispatcher(8)


T = TypeVar("T")

#: Maximum number of items that are processed on the event loop in one go.
INLINE_MAX_ITEMS = 64

#: Seconds after which an iteration yields to the event loop.
SLICE_S = 0.003


async def iterate_cooperatively(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items in order, and yield to the event loop every `SLICE_S` seconds."""
    since = time.monotonic()
    for item in items:
        if time.monotonic() - since > SLICE_S:
            await asyncio.sleep(0)
            since = time.monotonic()
        yield item


async def run_in_thread_if_many(count: int, function: Callable[[], T]) -> T:
    """Call a function that processes `count` items: in a thread if they are many."""
    return function() if count <= INLINE_MAX_ITEMS else await asyncio.to_thread(function)
