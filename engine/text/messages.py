"""Chat messages as a template may see them: plain JSON values, content in the form it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.contract.errors import InvalidRequest
from engine.text.jinja import ChatTemplate
from engine.text.unicode import without_surrogates

MAX_DEPTH = 100
#: Names a message's reasoning goes by; templates read the first, gpt-oss's the second.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
Message = dict[str, Any]
CONTENT_FORMATS = ("auto", "string", "openai")


def plain_value(value: Any, param: str, depth: int = 0) -> Any:
    """A deep copy made of exact JSON types, so that a template can't reach anything else.

    Raises:
        InvalidRequest: some other type, or nested deeper than `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{param} is nested deeper than {MAX_DEPTH} levels.", param=param)
    if isinstance(value, str):
        return without_surrogates(str.__str__(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value
    if isinstance(value, dict):
        return {
            plain_value(key, param, depth): plain_value(item, param, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_value(item, param, depth + 1) for item in value]
    raise InvalidRequest(f"{param} holds a {type(value).__name__}, which is no JSON.", param=param)


def prepare_messages(
    messages: Sequence[Any], template: ChatTemplate, content_format: str = "auto"
) -> list[Message]:
    """Messages to render: without absent (None) fields, content as the template reads it.

    `content_format`: "string" or "openai" (a list of parts) for every message; "auto" is what the
    template's source tells.

    Raises:
        InvalidRequest: none at all, one that's no object with a role, or content of a wrong type.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages must be a list of at least one message.", param="messages")
    if content_format not in CONTENT_FORMATS:
        raise InvalidRequest(
            f"The content format must be one of {', '.join(CONTENT_FORMATS)}.", param="messages"
        )
    wraps = template.iterates_content and not template.tests_content
    takes_parts = template.iterates_content
    if content_format != "auto":
        wraps = takes_parts = content_format == "openai"
    return [_prepare(k, message, wraps, takes_parts) for k, message in enumerate(messages)]


def _prepare(index: int, message: Any, wraps: bool, takes_parts: bool) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object.", param="messages")
    prepared: Message = {
        key: plain_value(value, "messages") for key, value in message.items() if value is not None
    }
    if not isinstance(prepared.get("role"), str):
        raise InvalidRequest(f"{where}.role must be a string.", param="messages")
    if "content" in prepared:
        prepared["content"] = _content(where, prepared["content"], wraps, takes_parts)
    reasoning = next((prepared[name] for name in REASONING_FIELDS if name in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    return prepared


def _content(where: str, content: Any, wraps: bool, takes_parts: bool) -> str | list[Any]:
    """A string or parts: strings as parts with `wraps`, parts as a string without `takes_parts`."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wraps else content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{where}.content must be a string or a list of parts.", param="messages"
        )
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if takes_parts:
        return parts
    return "\n".join(_part_text(f"{where}.content[{k}]", part) for k, part in enumerate(parts))


def _part_text(where: str, part: Any) -> str:
    """The text of a content part."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind != "text":
        raise InvalidRequest(
            f"{where} has type {kind!r}, but this model's chat template takes text only.",
            param="messages",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string.", param="messages")
    return text
