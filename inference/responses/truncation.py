"""`truncation: "auto"`: a conversation that is too long loses its oldest messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.contract.errors import ContextLengthExceeded
from inference.chat.job import prompt_token_ids
from inference.generation import Served
from inference.openai.schemas import ChatRequest
from inference.rendering.pool import beside

SYSTEM = ("system", "developer")


def without_oldest(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Without the `count` oldest messages that aren't the system's; the last one always stays.

    Outputs of calls that are gone go with them.
    """
    spoken = [place for place, message in enumerate(messages) if message["role"] not in SYSTEM]
    gone = set(spoken[:-1][:count])
    kept = [message for place, message in enumerate(messages) if place not in gone]
    calls = {call["id"] for message in kept for call in message.get("tool_calls") or ()}
    return [m for m in kept if m["role"] != "tool" or m["tool_call_id"] in calls or m is kept[-1]]


async def fitted(make: Callable[[int], ChatRequest], served: Served) -> ChatRequest:
    """The chat without as few of its oldest messages as need be; with one alone, if none fits.

    Args:
        make: the chat without so many messages.
    """

    async def fits(count: int) -> bool:
        chat = await beside(make, count)
        try:
            prompt = await prompt_token_ids(chat, served, generates=True)
        except ContextLengthExceeded:
            return False
        # A limit is a ceiling: one as large as the context mustn't cost all that was said.
        wanted = min(chat.output_limit or 1, served.info.max_model_len // 2)
        return len(prompt) + wanted <= served.info.max_model_len

    if await fits(0):
        return await beside(make, 0)
    low, high = 0, len((await beside(make, 0)).messages)  # low doesn't fit; high may
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(middle) else (middle, high)
    return await beside(make, high)
