"""Chat messages for templates: plain JSON values with content in the form that templates read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engine.contract.errors import InvalidRequest
from engine.text.template_formats import (
    CallFormat,
    ContentForm,
    Message,
    call_format,
    content_forms,
    text_part,
)

_SURROGATE = re.compile("[\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    """Return `text` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    if text.isascii() or _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


MAX_DEPTH = 100
#: Names of a message's reasoning; templates read the first, gpt-oss's the second.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
#: Values of `content_format`, and the forms of content that each allows.
CONTENT_FORMATS: dict[str, frozenset[ContentForm] | None] = {
    "auto": None,
    "string": frozenset(("string",)),
    "openai": frozenset(("parts",)),
}


def copy_json_value(value: Any, param: str, depth: int = 0) -> Any:
    """Return a deep copy of exact JSON types, so that a template can't access anything else.

    Raises:
        InvalidRequest: the value has another type, or is nested deeper than `MAX_DEPTH`.
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
            copy_json_value(key, param, depth): copy_json_value(item, param, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [copy_json_value(item, param, depth + 1) for item in value]
    raise InvalidRequest(f"{param} holds a {type(value).__name__}, which is no JSON.", param=param)


def prepare_messages(
    messages: Sequence[Any], template: str, content_format: str = "auto", image_mark: str = ""
) -> list[Message]:
    """Return messages as the template reads them: without absent (None) fields, and with content
    and call arguments in a form that it supports.

    `content_format`: "string" or "openai" (a list of parts) for every message; "auto": the form
    that the template reads. `image_mark`: inserted for each image in content that becomes a string,
    before its text; "" if the model has no image token.

    Raises:
        InvalidRequest: no messages, one that isn't an object with a role, or invalid content.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages must be a list of at least one message.", param="messages")
    if content_format not in CONTENT_FORMATS:
        raise InvalidRequest(
            f"The content format must be one of {', '.join(CONTENT_FORMATS)}.", param="messages"
        )
    forms = CONTENT_FORMATS[content_format]
    return [_prepare(k, message, template, forms, image_mark) for k, message in enumerate(messages)]


def _prepare(
    index: int,
    message: Any,
    template: str,
    forms: frozenset[ContentForm] | None,
    image_mark: str,
) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object.", param="messages")
    prepared: Message = {
        key: copy_json_value(value, "messages")
        for key, value in message.items()
        if value is not None and not (key == "tool_calls" and value == [])
    }
    role = prepared.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where}.role must be a string.", param="messages")
    if isinstance(prepared.get("tool_calls"), list):
        form = call_format(template)
        prepared["tool_calls"] = [_prepare_call(call, form) for call in prepared["tool_calls"]]
        if form.needs_content:
            prepared.setdefault("content", "")
    elif "content" in message:  # null
        prepared.setdefault("content", "")
    if "content" in prepared:
        role_forms = content_forms(template, role) if forms is None else forms
        prepared["content"] = _content(where, prepared["content"], role_forms, image_mark)
    reasoning = next((prepared[name] for name in REASONING_FIELDS if name in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    return prepared


def _content(
    where: str, content: Any, forms: frozenset[ContentForm], image_mark: str
) -> str | list[Any]:
    """Return content in one of the forms; unchanged if it already has one of them."""
    if isinstance(content, list):
        parts = [text_part(part) if isinstance(part, str) else part for part in content]
        if "parts" in forms:
            return parts
        num_images = sum(map(is_image, parts)) if image_mark else 0
        texts = [
            _part_text(f"{where}.content[{k}]", part)
            for k, part in enumerate(parts)
            if not (image_mark and is_image(part))
        ]
        content = "\n".join([image_mark] * num_images + texts)
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{where}.content must be a string or a list of parts.", param="messages"
        )
    return content if "string" in forms or not forms else [text_part(content)]


def _prepare_call(call: Any, form: CallFormat) -> Any:
    """Return a call with its arguments in the form that the template reads."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    arguments = function.get("arguments")
    if not form.arguments_as_text:
        arguments = _arguments_object(arguments)
    elif not isinstance(arguments, str) or arguments.strip() in ("", "null"):
        arguments = json.dumps(_arguments_object(arguments), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments_object(arguments: Any) -> dict[str, Any]:
    """Return arguments as an object; invalid or truncated JSON becomes the value of one field."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = (
                copy_json_value(json.loads(arguments), "messages") if arguments.strip() else None
            )
        except (ValueError, RecursionError, InvalidRequest):
            value = arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": value}


def is_image(part: Any) -> bool:
    """Whether a content part is an image in a form that templates know."""
    return isinstance(part, dict) and part.get("type") == "image"


def _part_text(where: str, part: Any) -> str:
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


# Control tokens typed by a client stay text, so that nobody can forge a role with `<|im_start|>`.
# Characters that begin a control token are replaced in the client's strings by stand-ins (code
# points of a private-use plane that the strings don't contain), so any control token in the
# rendered text was written by the template. Each stand-in replaces one character, so offsets stay
# the same and no template operation can split one.


#: Range of stand-ins (supplementary private use area B).
_FIRST_STAND_IN = 0x100000
#: Roles whose messages are written by the client or the model: in these only special tokens are
#: text. `<think>` or `<tool_call>` there are control tokens for the model.
_TRUSTED_ROLES = frozenset(("assistant", "system", "developer"))


def _alternatives(tokens: frozenset[str]) -> str:
    """Return a regex for any of the tokens, longest first; without tokens it never matches."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"


class ControlTokens:
    """The control tokens of one tokenizer.

    Args:
        special: special tokens.
        control: special tokens, and added ones that the chat template writes.
    """

    def __init__(self, special: frozenset[str], control: frozenset[str]) -> None:
        self.pattern = re.compile(_alternatives(control))
        self.first_chars = "".join(sorted({token[0] for token in control if token}))
        initial = f"[{re.escape(self.first_chars)}]" if self.first_chars else "(?!)"
        self._initial = re.compile(initial)
        self._special = re.compile(_alternatives(special))
        self._allowed = re.compile(f"(?P<allowed>{_alternatives(control - special)})|{initial}")

    def may_begin_in(self, value: Any) -> bool:
        """Whether any string in `value` has a character that begins a control token."""
        return any(self._initial.search(text) for text in strings_in(value))

    def find(self, text: str) -> list[str]:
        """Return the control tokens in `text`, from left to right."""
        return self.pattern.findall(text)

    def forbidden(self, role: str | None) -> re.Pattern[str]:
        """Return the tokens that must stay text in a message of this role; None: elsewhere."""
        return self._special if role is None or role in _TRUSTED_ROLES else self.pattern

    def initials(self, role: str | None) -> re.Pattern[str]:
        """Match characters that may begin a forbidden token; group `allowed` stays unchanged."""
        return self._allowed if role is None or role in _TRUSTED_ROLES else self._initial


def unused_chars(inputs: Any) -> Iterator[str]:
    """Yield private-use characters that no string in `inputs` contains."""
    used = {char for text in strings_in(inputs) if not text.isascii() for char in text}
    return (char for char in map(chr, range(_FIRST_STAND_IN, 0x110000)) if char not in used)


class ControlTokenMask:
    """The stand-ins of one request.

    Args:
        tokens: the tokenizer's control tokens.
        inputs: all client input that the template receives.
    """

    def __init__(self, tokens: ControlTokens, inputs: Any) -> None:
        self._tokens = tokens
        self._stand_in = dict(zip(tokens.first_chars, unused_chars(inputs)))
        self._original = str.maketrans({new: old for old, new in self._stand_in.items()})

    def tokens(self, text: str, role: str | None) -> str:
        """Return `text` with the first character of each forbidden token masked."""
        pattern = self._tokens.forbidden(role)
        while pattern.search(text):  # repeated for tokens that overlap a masked one
            text = pattern.sub(lambda match: self._stand_in[match[0][0]] + match[0][1:], text)
        return text

    def initials(self, text: str, role: str | None) -> str:
        """Return `text` with every character masked that may begin a forbidden token."""
        pattern = self._tokens.initials(role)

        def mask(match: re.Match[str]) -> str:
            allowed = match.groupdict().get("allowed")
            return self._stand_in[match[0]] if allowed is None else match[0]

        return pattern.sub(mask, text)

    def unescape(self, text: str) -> str:
        """Decode stand-ins that a template has escaped as JSON (`\\udbc0...`)."""
        for stand_in in self._stand_in.values():
            text = text.replace(json.dumps(stand_in)[1:-1], stand_in)
        return text

    def restore(self, text: str) -> str:
        """Return `text` with stand-ins replaced by the original characters."""
        return text.translate(self._original)


def mask_strings(value: Any, mask: Any, role: str | None = None) -> Any:
    """Apply `mask(text, role)` to every string in `value`, including keys of objects."""
    if isinstance(value, str):
        return mask(value, role)
    if isinstance(value, list):
        return [mask_strings(item, mask, role) for item in value]
    if isinstance(value, dict):
        return {mask_strings(k, mask, role): mask_strings(v, mask, role) for k, v in value.items()}
    return value


def mask_messages(messages: list[Message], mask: Any) -> list[Message]:
    """Return messages with every string masked by its message's role."""
    return [mask_strings(message, mask, message["role"]) for message in messages]


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, including keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)


#: Variables that `render_chat` sets itself.
RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenizer",
        "limits",
        "content_format",
        "max_tokens",
    }
)


def check_template_kwargs(names: Iterable[str]) -> None:
    """Raise `InvalidRequest` for an invalid name of a template variable."""
    for name in names:
        if name == "chat_template":
            raise InvalidRequest(
                "chat_template_kwargs can't hold a chat template.",
                param="chat_template_kwargs.chat_template",
                code="unsupported_parameter",
            )
        if name in RESERVED_VARIABLES or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(
                f"chat_template_kwargs can't hold {name[:50]!r}.", param="chat_template_kwargs"
            )
