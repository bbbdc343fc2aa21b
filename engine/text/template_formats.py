"""Which forms of content and arguments a chat template reads, from rendering short chats with it.

A template's source doesn't tell: it may read content through a macro, a variable or a filter, and
test the type of something else. So each form is rendered once, and counts if its text comes out.
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
#: The forms of content: a string, any number of text parts, exactly one text part.
ContentForm = Literal["string", "parts", "one_part"]

#: A short chat takes a template a few hundred steps.
_LIMITS = RenderLimits(steps=20_000, seconds=5.0)
_TEXTS = ("Probe one.", "Probe two.")
_ARGUMENTS = {"probe_name": "probe value"}
_ARGUMENTS_TEXT = json.dumps(_ARGUMENTS)
#: Arguments that a template wrote as an object in JSON or in Python.
_OBJECT = re.compile(r"""\{\s*["']probe_name["']\s*:""")
#: Parts that a template wrote as JSON or Python in place of their text.
_PART = re.compile(r"""["']type["']\s*:\s*["']text["']""")
_FUNCTION = {
    "name": "probe",
    "description": "",
    "parameters": {"type": "object", "properties": {"probe_name": {"type": "string"}}},
}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALL_ID = "probe0000"  # Mistral's templates take nine characters only


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a template reads an assistant's message with tool calls.

    Attributes:
        arguments_as_text: arguments are JSON text, not an object.
        needs_content: a message without text needs an empty content.
    """

    arguments_as_text: bool = False
    needs_content: bool = False


def text_part(text: str) -> dict[str, str]:
    """A content part that holds text."""
    return {"type": "text", "text": text}


@lru_cache(maxsize=8 * CACHED_TEMPLATES)
def content_forms(source: str, role: str) -> frozenset[ContentForm]:
    """The forms in which a template reads the content of a role's messages; none if it reads none.

    Raises:
        InvalidRequest: the source is no valid template.
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
    """Chats with one message of this role; the others' content is a string, or parts."""
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
    """How a template reads calls; an object without content for one that reads none.

    Text is preferred where an object would be written as JSON: it stays as the model wrote it, so
    its tokens are those in the prefix cache.
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
    return CallFormat()


def _calling_message(form: CallFormat) -> Message:
    arguments = _ARGUMENTS_TEXT if form.arguments_as_text else _ARGUMENTS
    function = {"name": "probe", "arguments": arguments}
    message: Message = {
        "role": "assistant",
        "tool_calls": [{"id": _CALL_ID, "type": "function", "function": function}],
    }
    return message | {"content": ""} if form.needs_content else message


def _render(source: str, messages: list[Message]) -> str:
    """The rendered chat; "" where the template refuses it."""
    context = {**dict.fromkeys(STANDARD_TOKENS, ""), "messages": messages, "tools": _TOOLS}
    try:
        return compile_template(source).render(context, _LIMITS)
    except InvalidRequest:
        return ""
