"""Determines which forms of content and arguments a chat template reads, by rendering short chats.

The source doesn't show it: a template may read content through a macro, a variable or a filter, and
test the type of something else. So each form is rendered once, and counts if its text appears.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from engine.contract.errors import InvalidRequest
from engine.text.jinja_sandbox import CACHED_TEMPLATES, RenderLimits, compile_template
from engine.text.tokenizer_files import STANDARD_TOKENS

Message = dict[str, Any]
#: Forms of content: a string, any number of text parts, exactly one text part.
ContentForm = Literal["string", "parts", "one_part"]

#: Limits for a short chat, which takes a template a few hundred steps.
_LIMITS = RenderLimits(steps=20_000, seconds=5.0)
_TEXTS = ("Probe one.", "Probe two.")
_ARGUMENTS = {"probe_name": "probe value"}
_ARGUMENTS_TEXT = json.dumps(_ARGUMENTS)
#: Arguments that a template has written as an object in JSON or Python.
_OBJECT = re.compile(r"""\{\s*["']probe_name["']\s*:""")
#: Parts that a template has written as JSON or Python instead of their text.
_PART = re.compile(r"""["']type["']\s*:\s*["']text["']""")
_FUNCTION = {
    "name": "probe",
    "description": "",
    "parameters": {"type": "object", "properties": {"probe_name": {"type": "string"}}},
}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALL_ID = "probe0000"  # Mistral's templates require nine characters


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a template reads an assistant's message with tool calls.

    Attributes:
        arguments_as_text: whether arguments are JSON text instead of an object.
        needs_content: whether a message without text needs empty content.
    """

    arguments_as_text: bool = False
    needs_content: bool = False


def text_part(text: str) -> dict[str, str]:
    """Return a content part with text."""
    return {"type": "text", "text": text}


@lru_cache(maxsize=8 * CACHED_TEMPLATES)
def content_forms(source: str, role: str) -> frozenset[ContentForm]:
    """Return the forms in which a template reads content of a role; none if it reads none.

    Raises:
        InvalidRequest: the source is not a valid template.
    """
    compile_template(source)
    contents: dict[ContentForm, tuple[Any, int]] = {
        "string": (_TEXTS[0], 1),
        "one_part": ([text_part(_TEXTS[0])], 1),
        "parts": ([text_part(text) for text in _TEXTS], 2),
    }
    return frozenset(
        form for form, (content, texts) in contents.items() if _reads(source, role, content, texts)
    )


def _reads(source: str, role: str, content: Any, num_texts: int) -> bool:
    for chat in _chats_with(source, role, content):
        rendered = _render(source, chat)
        if all(text in rendered for text in _TEXTS[:num_texts]) and not _PART.search(rendered):
            return True
    return False


def _chats_with(source: str, role: str, content: Any) -> Iterator[list[Message]]:
    """Return chats with one message of this role; others' content is a string, or parts."""
    message = {"role": role, "content": content}
    for other in ("x", [text_part("x")]):
        user = {"role": "user", "content": other}
        if role == "user":
            yield [message]
        elif role == "assistant":
            yield [user, message, user]
        elif role == "tool":
            call = _calling_message(call_format(source))
            result = {**message, "tool_call_id": _CALL_ID, "name": "probe"}
            yield [user, call, result]
            yield [user, {**call, "content": other}, result]
        else:
            yield [message, user]


@lru_cache(maxsize=CACHED_TEMPLATES)
def call_format(source: str) -> CallFormat:
    """Return how a template reads calls; an object, with content if need be, if it reads none.

    Text is preferred if the template would write an object as JSON: it stays as the model wrote it,
    so its tokens match those in the prefix cache.
    """
    for other, with_result, needs_content in product(
        ("x", [text_part("x")]), (True, False), (False, True)
    ):
        chat = [{"role": "user", "content": other}]
        result = {"role": "tool", "content": other, "tool_call_id": _CALL_ID, "name": "probe"}
        results = [result] if with_result else []
        as_text = CallFormat(arguments_as_text=True, needs_content=needs_content)
        as_object = CallFormat(needs_content=needs_content)
        text = _render(source, [*chat, _calling_message(as_text), *results])
        rendered = _render(source, [*chat, _calling_message(as_object), *results])
        reads_object = all(word in rendered for item in _ARGUMENTS.items() for word in item)
        if reads_object and not (_ARGUMENTS_TEXT in text and _OBJECT.search(rendered)):
            return as_object
        if _ARGUMENTS_TEXT in text:
            return as_text
    bare = _calling_message(CallFormat())
    return CallFormat(needs_content=not _render(source, [{"role": "user", "content": "x"}, bare]))


def _calling_message(form: CallFormat) -> Message:
    arguments = _ARGUMENTS_TEXT if form.arguments_as_text else _ARGUMENTS
    function = {"name": "probe", "arguments": arguments}
    message: Message = {
        "role": "assistant",
        "tool_calls": [{"id": _CALL_ID, "type": "function", "function": function}],
    }
    return message | {"content": ""} if form.needs_content else message


def _render(source: str, messages: list[Message]) -> str:
    """Return the rendered chat; "" if the template refuses it."""
    context = {**dict.fromkeys(STANDARD_TOKENS, ""), "messages": messages, "tools": _TOOLS}
    try:
        return compile_template(source).render(context, _LIMITS)
    except InvalidRequest:
        return ""
