"""Going through thousands of things on the event loop, without holding up what else it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

#: How long the loop is kept at a time.
TURN_S = 0.005


async def in_turns(things: Iterable[T]) -> AsyncIterator[T]:
    """The things, one after the other; whatever else is due comes in between."""
    since = time.monotonic()
    for thing in things:
        if time.monotonic() - since > TURN_S:
            await asyncio.sleep(0)
            since = time.monotonic()
        yield thing
