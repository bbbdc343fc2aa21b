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


class FairTurns:
    """Lets those who wait go on. All methods are called on one event loop.

    Args:
        at_once: how many go on in one turn of the loop; and of how many tenants, none of whose
            wait, one each does beside them.
        behind, few: while others wait there, turns are long, and of these so few go on in one.
    """

    def __init__(self, at_once: int, behind: FairTurns | None = None, few: int = 0) -> None:
        self._at_once = self._left = self._beside = at_once
        self._behind, self._few = behind, few
        self._lines: OrderedDict[str, deque[Waiter]] = OrderedDict()
        #: Tenants of whom one went on in this turn.
        self._gone: set[str] = set()
        self._counting = False

    def give(self, tenant: str, waiter: Waiter) -> None:
        """Set the waiter's result when it's its turn: now, unless several came before it."""
        if not self._counting:
            self._counting = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._next_turn, loop)
        if self._goes_now(tenant):
            waiter.set_result(None)
        else:
            self._lines.setdefault(tenant, deque()).append(waiter)

    def _goes_now(self, tenant: str) -> bool:
        """Whether one that comes now needn't wait; it's counted then."""
        if self._left and not self._lines:
            self._left -= 1
        elif self._beside and tenant not in self._gone and tenant not in self._lines:
            self._beside -= 1
        else:
            return False
        self._gone.add(tenant)
        return True

    async def wait(self, tenant: str) -> None:
        """Return when it's the turn of whoever calls."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.give(tenant, waiter)
        if not waiter.done():
            await waiter

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._beside = self._at_once
        if self._behind is not None and self._behind._lines:
            self._left = self._few
        self._gone.clear()
        while self._left and self._lines:
            tenant, line = self._lines.popitem(last=False)
            first = line.popleft()
            if line:
                self._lines[tenant] = line  # behind the others
            if not first.done():  # else nobody waits any more
                first.set_result(None)
                self._gone.add(tenant)
                self._left -= 1
        self._counting = bool(self._gone or self._lines)
        if self._counting:
            loop.call_soon(self._next_turn, loop)


class LoopTurns:
    """A `FairTurns` for each event loop."""

    def __init__(self, at_once: int, behind: LoopTurns | None = None, few: int = 0) -> None:
        self._at_once = at_once
        self._behind, self._few = behind, few
        self._of: WeakKeyDictionary[asyncio.AbstractEventLoop, FairTurns] = WeakKeyDictionary()
        self._last: tuple[Callable[[], object], FairTurns] | None = None

    def here(self) -> FairTurns:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        # A token asks, and to look into the dictionary takes as long as to hand one out.
        if self._last is not None and self._last[0]() is loop:
            return self._last[1]
        turns = self._of.get(loop)
        if turns is None:
            behind = None if self._behind is None else self._behind.here()
            turns = self._of[loop] = FairTurns(self._at_once, behind, self._few)
        self._last = weakref.ref(loop), turns
        return turns


#: Requests that begin (each takes a millisecond or two), and those that end.
begins, ends = LoopTurns(1), LoopTurns(4)
#: Streams that are woken. While a crowd begins it's fewer: what comes for the others meanwhile
#: leaves in one piece, so there's less to do until the crowd has begun.
wakes = LoopTurns(16, begins, 6)
#: Requests that are refused before anything is made of them.
refusals = LoopTurns(8)


# -- Going through thousands of things on the event loop, without holding up what else it does.


T = TypeVar("T")

#: Going through so few things takes the loop no time to speak of.
FEW = 64

#: How long the loop is kept at a time.
TURN_S = 0.003


async def in_turns(things: Iterable[T]) -> AsyncIterator[T]:
    """The things, one after the other; whatever else is due comes in between."""
    since = time.monotonic()
    for thing in things:
        if time.monotonic() - since > TURN_S:
            await asyncio.sleep(0)
            since = time.monotonic()
        yield thing


async def beside_loop(count: int, function: Callable[[], T]) -> T:
    """`function()`, which goes through so many things: through many in a thread."""
    return function() if count <= FEW else await asyncio.to_thread(function)
