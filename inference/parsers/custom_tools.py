"""OpenAI's custom tools, which the model sees as functions with one string parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from inference.parsers.state_machine import Part

#: Name of the only parameter of the function that represents a custom tool.
INPUT = "input"
_ABOUT_INPUT = "The tool's whole input, as plain text."
#: Precedes the input text in a call's arguments.
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_HEAD = 256
#: An incomplete escape at the end of the text, or an incomplete surrogate pair.
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?$")


def as_template_function(name: str, description: str | None) -> dict[str, Any]:
    """Return a custom tool as the function that chat templates receive."""
    about = {"description": description} if description is not None else {}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters()}}


def parameters() -> dict[str, Any]:
    """Return the JSON schema of the parameters that every custom tool has."""
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": _ABOUT_INPUT}},
        "required": [INPUT],
        "additionalProperties": False,
    }


def to_function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a custom tool call of a message into a function call."""
    custom = call["custom"]
    arguments = json.dumps({INPUT: custom["input"]}, ensure_ascii=False)
    function = {"name": custom["name"], "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


class CustomToolCalls:
    """Converts function calls of custom tools, among an output's parts, into custom tool calls.

    Their arguments, `{"input": "..."}`, are decoded incrementally into the input text. A model
    whose output no grammar constrains may write other arguments; these become the input unchanged.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._call = -1
        self._buffer = ""
        self._state = "head"

    def push(self, parts: list[Part], *, is_final: bool) -> list[Part]:
        """Return the parts, with calls of custom tools converted."""
        out: list[Part] = []
        for part in parts:
            if part.kind == "call":
                out += self._flush()
                if part.text in self._names:
                    self._call = part.call
                    part = Part("custom", part.text, part.call, part.id)
            if part.kind == "arguments" and part.call == self._call:
                text = self._text(part.text)
                part = Part("input", text, part.call)
            if part.text or part.kind in ("call", "custom"):
                out.append(part)
        return out + self._flush() if is_final else out

    def _text(self, arguments: str) -> str:
        self._buffer += arguments
        if self._state == "head":
            head = _HEAD.match(self._buffer)
            if head is None:
                if len(self._buffer) > MAX_HEAD:
                    self._state = "odd"
                return ""
            self._buffer, self._state = self._buffer[head.end() :], "text"
        return self._of_string() if self._state == "text" else ""

    def _of_string(self) -> str:
        """Decode as much of the JSON string as can't change with more text."""
        end = _closing_quote(self._buffer)
        if end is not None:
            text, self._buffer, self._state = self._buffer[:end], "", "past"
            return _decoded(text)
        half = _HIGH_SURROGATE.search(self._buffer) or _odd_escape(self._buffer)
        cut = half if isinstance(half, int) else half.start() if half else len(self._buffer)
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return _decoded(text)

    def _flush(self) -> list[Part]:
        """End a call: arguments other than `{"input": "..."}` become the input unchanged."""
        call, buffer, state = self._call, self._buffer, self._state
        self._call, self._buffer, self._state = -1, "", "head"
        if call < 0 or not buffer or state == "past":
            return []
        text = _decoded(buffer) if state == "text" else _single_string_argument(buffer)
        return [Part("input", text, call)] if text else []


def _closing_quote(text: str) -> int | None:
    position = 0
    while position < len(text):
        if text[position] == "\\":
            position += 2
            continue
        if text[position] == '"':
            return position
        position += 1
    return None


def _odd_escape(text: str) -> int | None:
    """Return where an incomplete escape begins; None if all are complete."""
    match = _ESCAPE.search(text)
    if match is None:
        return None
    num_backslashes = len(text[: match.start()]) - len(text[: match.start()].rstrip("\\"))
    return match.start() if num_backslashes % 2 == 0 else None


def _decoded(text: str) -> str:
    """Decode the inside of a JSON string; return invalid text unchanged."""
    if "\\" not in text:
        return text
    try:
        value = str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _single_string_argument(arguments: str) -> str:
    """Return an object's only string value, whatever its key; else the arguments unchanged."""
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(decoded, dict) and len(decoded) == 1:
        (value,) = decoded.values()
        if isinstance(value, str):
            return value
    return decoded if isinstance(decoded, str) else arguments
