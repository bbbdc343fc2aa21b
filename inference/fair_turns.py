"""Of what becomes due at once a little is done in each turn of the event loop, tenants one by one.

Two hundred of one tenant's requests that begin or end take the loop hundreds of milliseconds, and a
step's tokens of as many streams tens. In that time another tenant's would wait for all of them: at
each of the handful of turns that a request takes until its first token has left.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from weakref import WeakKeyDictionary


class FairTurns:
    """Lets those who wait go on. All methods are called on one event loop.

    Args:
        at_once: how many go on in one turn of the loop.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = self._left = at_once
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._counting = False

    def give(self, tenant: str, waiter: asyncio.Future[None]) -> None:
        """Set the waiter's result when it's its turn: now, unless several came before it."""
        if not self._counting:
            self._counting = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._next_turn, loop)
        if self._left and not self._lines:
            self._left -= 1
            waiter.set_result(None)
        else:
            self._lines.setdefault(tenant, deque()).append(waiter)

    async def wait(self, tenant: str) -> None:
        """Return when it's the turn of whoever calls."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.give(tenant, waiter)
        if not waiter.done():
            await waiter

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._at_once
        while self._left and self._lines:
            tenant, line = self._lines.popitem(last=False)
            first = line.popleft()
            if line:
                self._lines[tenant] = line  # behind the others
            if not first.done():  # else nobody waits any more
                first.set_result(None)
                self._left -= 1
        self._counting = self._left < self._at_once or bool(self._lines)
        if self._counting:
            loop.call_soon(self._next_turn, loop)


class LoopTurns:
    """A `FairTurns` for each event loop."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._of: WeakKeyDictionary[asyncio.AbstractEventLoop, FairTurns] = WeakKeyDictionary()

    def here(self) -> FairTurns:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        turns = self._of.get(loop)
        if turns is None:
            turns = self._of[loop] = FairTurns(self._at_once)
        return turns


#: Requests that begin (each takes a millisecond or two), those that end, streams that are woken.
begins, ends, wakes = LoopTurns(2), LoopTurns(4), LoopTurns(16)
#: Requests that are refused before anything is made of them.
refusals = LoopTurns(8)
