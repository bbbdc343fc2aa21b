"""Chat messages as a model's template understands them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def template_messages(messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The client's (checked) messages, adapted to what the template can read.

    OpenAI's newer role "developer" is "system" to templates that don't know it. A call's arguments
    are JSON text in OpenAI's format; templates want the object, unless they test for text.
    """
    knows_developer = "developer" in template
    takes_text = "is string" in template
    return [_adapt(message, knows_developer, takes_text) for message in messages]


def _adapt(message: dict[str, Any], knows_developer: bool, takes_text: bool) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if message["role"] == "developer" and not knows_developer:
        changes["role"] = "system"
    if message.get("tool_calls") and not takes_text:
        changes["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return {**message, **changes} if changes else message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # what a model once wrote wrongly is shown to it as it was
    return {**call, "function": {**function, "arguments": arguments}}
