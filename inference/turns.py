"""Going through thousands of things on the event loop, without holding up what else it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

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
