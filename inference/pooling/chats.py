"""Chats as input of the pooling endpoints: rendered by the model's template, then pooled."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import InvalidRequest
from engine.contract.pooling_params import PoolingParams
from engine.text.parts import room_for
from inference.chat.job import prompt_token_ids
from inference.generation import Served
from inference.openai.schemas import ChatRequest
from inference.openai.serving import parse
from inference.rendering.prompts import truncated
from inference.settings import gateway_settings

#: How a chat is rendered: `ChatRequest`'s fields, which check them.
RENDERING = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
)


def is_chat(value: Any) -> bool:
    """Whether it's a list of messages, or a list of such lists."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def parsed_chats(messages: Any, rendering: dict[str, Any]) -> list[ChatRequest]:
    """One chat, or a list of several, each checked as the chat endpoint checks it.

    Unlike there, no generation prompt is added unless it's asked for.

    Raises: `InvalidRequest` and pydantic's ValidationError, naming the fields of a chat.
    """
    several = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
    chats = messages if several else [messages]
    limit = gateway_settings().max_prompts
    if len(chats) > limit:
        raise InvalidRequest(
            f"messages holds {len(chats)} chats; at most {limit} may be sent at once.",
            param="messages",
        )
    given = {"add_generation_prompt": False} | rendering
    return [parse(ChatRequest, given | {"messages": chat}) for chat in chats]


async def chat_prompts(
    served: Served, chats: list[ChatRequest], params: PoolingParams, side: str
) -> list[list[int]]:
    """Token ids of each, cut at `side` where `params` say so; special tokens stay.

    Raises: what the template refuses, as the chat endpoint does.
    """
    limit = params.prompt_limit(served.info.max_model_len)
    found = []
    for chat in chats:
        wants_special = bool(chat.add_special_tokens)
        plain = chat.model_copy(update={"add_special_tokens": False})
        ids = await prompt_token_ids(plain, served)
        wrapped = served.tokenizer.wrapped
        if limit is not None:
            special = len(wrapped([])) if wants_special else 0
            ids = truncated(ids, room_for(limit, special), side)
        found.append(wrapped(ids) if wants_special else ids)
    return found
