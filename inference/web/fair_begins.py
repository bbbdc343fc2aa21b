"""Requests that come at once begin a few in each turn of the event loop, tenants one by one.

Two hundred of one tenant's take the loop some hundred milliseconds, in which another one's would
wait for all of them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from weakref import WeakKeyDictionary

#: Requests that begin in one turn of the loop.
AT_ONCE = 4


class FairBegins:
    """Of one event loop."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._left, self._counting = AT_ONCE, False

    async def wait(self, tenant: str) -> None:
        """Return when it's the turn of this request: at once, unless several came before it."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_turn, loop)
        if self._left and not self._lines:
            self._left -= 1
            return
        mine = loop.create_future()
        self._lines.setdefault(tenant, deque()).append(mine)
        await mine

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = AT_ONCE
        while self._left and self._lines:
            tenant, line = self._lines.popitem(last=False)
            first = line.popleft()
            if line:
                self._lines[tenant] = line  # behind the others
            if not first.done():  # its client has left meanwhile
                first.set_result(None)
                self._left -= 1
        self._counting = self._left < AT_ONCE or bool(self._lines)
        if self._counting:
            loop.call_soon(self._next_turn, loop)


_begins: WeakKeyDictionary[asyncio.AbstractEventLoop, FairBegins] = WeakKeyDictionary()


async def turn_of(tenant: str) -> None:
    """`FairBegins.wait` of the running loop."""
    loop = asyncio.get_running_loop()
    begins = _begins.get(loop)
    if begins is None:
        begins = _begins[loop] = FairBegins()
    await begins.wait(tenant)
