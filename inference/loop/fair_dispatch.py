"""Of what becomes due at once a little is done in each turn of the event loop, tenants one by one.

Two hundred of one tenant's requests that begin or end take the loop hundreds of milliseconds, and a
step's tokens of as many streams tens. In that time another tenant's would wait for all of them: at
each of the handful of turns that a request takes until its first token has left. Nor does it wait
for the next of these turns, which are long then: a tenant of whom nobody waits goes on at once.
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
    """What of a future is needed."""

    def done(self) -> bool:
        """Whether nobody waits any more."""

    def set_result(self, result: None, /) -> None:
        """It's its turn."""


class FairDispatcher:
    """Lets those who wait go on. All methods are called on one event loop.

    Args:
        at_once: how many go on in one turn of the loop; and of how many tenants, none of whose
            wait, one each does beside them.
        behind, few: while others wait there, turns are long, and of these so few go on in one.
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
        #: Tenants of whom one went on in this turn.
        self._served_tenants: set[str] = set()
        self._counting = False

    def admit(self, tenant: str, waiter: Waiter) -> None:
        """Set the waiter's result when it's its turn: now, unless several came before it."""
        if not self._counting:
            self._counting = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._next_turn, loop)
        if self._admit_now(tenant):
            waiter.set_result(None)
        else:
            self._queues.setdefault(tenant, deque()).append(waiter)

    def _admit_now(self, tenant: str) -> bool:
        """Whether one that comes now needn't wait; it's counted then."""
        if self._num_remaining and not self._queues:
            self._num_remaining -= 1
        elif self._num_extra and tenant not in self._served_tenants and tenant not in self._queues:
            self._num_extra -= 1
        else:
            return False
        self._served_tenants.add(tenant)
        return True

    async def wait(self, tenant: str) -> None:
        """Return when it's the turn of whoever calls."""
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
            tenant, line = self._queues.popitem(last=False)
            first = line.popleft()
            if line:
                self._queues[tenant] = line  # behind the others
            if not first.done():  # else nobody waits any more
                first.set_result(None)
                self._served_tenants.add(tenant)
                self._num_remaining -= 1
        self._counting = bool(self._served_tenants or self._queues)
        if self._counting:
            loop.call_soon(self._next_turn, loop)


class LoopFairDispatcher:
    """A `FairDispatcher` for each event loop."""

    def __init__(
        self, at_once: int, behind: LoopFairDispatcher | None = None, few: int = 0
    ) -> None:
        self._max_per_turn = at_once
        self._lower_priority, self._max_when_busy = behind, few
        self._of: WeakKeyDictionary[asyncio.AbstractEventLoop, FairDispatcher] = WeakKeyDictionary()
        self._last: tuple[Callable[[], object], FairDispatcher] | None = None

    def current(self) -> FairDispatcher:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        # A token asks, and to look into the dictionary takes as long as to hand one out.
        if self._last is not None and self._last[0]() is loop:
            return self._last[1]
        turns = self._of.get(loop)
        if turns is None:
            behind = None if self._lower_priority is None else self._lower_priority.current()
            turns = self._of[loop] = FairDispatcher(self._max_per_turn, behind, self._max_when_busy)
        self._last = weakref.ref(loop), turns
        return turns


#: Requests that begin (each takes a millisecond or two), and those that end.
start_dispatch, finish_dispatch = LoopFairDispatcher(1), LoopFairDispatcher(4)
#: Streams that are woken. While a crowd begins it's fewer: what comes for the others meanwhile
#: leaves in one piece, so there's less to do until the crowd has begun.
wake_dispatch = LoopFairDispatcher(16, start_dispatch, 6)
#: Requests that are refused before anything is made of them.
rejection_dispatch = LoopFairDispatcher(8)


# -- Going through thousands of things on the event loop, without holding up what else it does.


T = TypeVar("T")

#: Going through so few things takes the loop no time to speak of.
INLINE_MAX_ITEMS = 64

#: How long the loop is kept at a time.
SLICE_S = 0.003


async def iterate_cooperatively(things: Iterable[T]) -> AsyncIterator[T]:
    """The things, one after the other; whatever else is due comes in between."""
    since = time.monotonic()
    for thing in things:
        if time.monotonic() - since > SLICE_S:
            await asyncio.sleep(0)
            since = time.monotonic()
        yield thing


async def run_in_thread_if_many(count: int, function: Callable[[], T]) -> T:
    """`function()`, which goes through so many things: through many in a thread."""
    return function() if count <= INLINE_MAX_ITEMS else await asyncio.to_thread(function)
