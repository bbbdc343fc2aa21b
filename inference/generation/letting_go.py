"""The end of millions of prompt tokens: freed at once they'd keep the event loop."""

from __future__ import annotations

import asyncio

from inference.generation.background import spawn
from inference.turns import in_turns

#: Fewer tokens than that are freed at once.
_FEW = 100_000
#: By when whoever else had them has let go.
_LINGER_S = 1.0


def let_go(prompts: list[list[int]]) -> None:
    """Have what nobody needs any more freed a few prompts at a time."""
    if sum(map(len, prompts)) >= _FEW:
        spawn(_free(list(prompts)))


async def _free(held: list[list[int]]) -> None:
    await asyncio.sleep(_LINGER_S)
    async for _ in in_turns(range(len(held))):
        held.pop()
