"""Chat messages as a model's template understands them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from engine.contract.errors import InvalidRequest
from engine.text import Tokenizer
from engine.text.chat_template import render_chat_text
from inference.openai.schemas.messages import TEXT_PARTS
from inference.tools.custom import as_function_call

Message = dict[str, Any]
_SYSTEM = ("system", "developer")
#: A conversation with a system message in its middle, which some templates refuse.
_PROBE = [{"role": role, "content": "x"} for role in ("system", "user", "system", "user")]


def template_messages(messages: Sequence[Message], template: str) -> list[Message]:
    """The client's (checked) messages, adapted to what the template can read.

    OpenAI's newer role "developer" is "system" to templates that don't know it; its oldest way to
    call, `function_call` and the role "function", becomes today's. A call's arguments are JSON text
    in OpenAI's format; templates want the object, unless they test for text.
    """
    knows_developer = "developer" in template
    takes_text = "is string" in template
    return [_adapt(message, knows_developer, takes_text) for message in messages]


def _adapt(message: Message, knows_developer: bool, takes_text: bool) -> Message:
    changes: Message = {}
    if message["role"] == "developer" and not knows_developer:
        changes["role"] = "system"
    if message["role"] == "function":
        changes |= {"role": "tool", "tool_call_id": message["name"]}
    calls = message.get("tool_calls") or _as_tool_calls(message)
    calls = [as_function_call(call) if call.get("type") == "custom" else call for call in calls]
    if calls:
        changes["tool_calls"] = calls if takes_text else [_with_object(call) for call in calls]
    content = message.get("content")
    if content is None and not calls:
        changes["content"] = ""
    elif isinstance(content, list):
        changes["content"] = [_text_part(part) for part in content]
    return {**message, **changes} if changes else message


def _as_tool_calls(message: Message) -> list[Message]:
    function = message.get("function_call")
    if function is None or message["role"] != "assistant":
        return []
    return [{"id": function["name"], "type": "function", "function": function}]


def _text_part(part: str | Message) -> str | Message:
    """A part under the one name that templates know."""
    if isinstance(part, str) or part["type"] == "text":
        return part
    return {"type": "text", "text": part[TEXT_PARTS[part["type"]]]}


def _with_object(call: Message) -> Message:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # what a model once wrote wrongly is shown to it as it was
    return {**call, "function": {**function, "arguments": arguments}}


def system_first(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Message]:
    """The same with all system messages in one at the front, for templates that want it so."""
    late = any(message["role"] in _SYSTEM for message in messages[1:])
    if not late or _takes_late_system(tokenizer):
        return list(messages)
    told = [message["content"] for message in messages if message["role"] in _SYSTEM]
    others = [message for message in messages if message["role"] not in _SYSTEM]
    return [{"role": "system", "content": "\n\n".join(told)}, *others]


@lru_cache(maxsize=16)
def _takes_late_system(tokenizer: Tokenizer) -> bool:
    try:
        render_chat_text(tokenizer, _PROBE)
    except InvalidRequest:
        return False
    return True
