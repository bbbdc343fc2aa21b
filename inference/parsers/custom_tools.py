"""OpenAI's custom tools: to a model functions of one text, to clients that text alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from inference.parsers.state_machine import Part

#: The one parameter of the function that a custom tool is to a model.
INPUT = "input"
_ABOUT_INPUT = "The tool's whole input, as plain text."
#: What stands before the text in a call's arguments.
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_HEAD = 256
#: The last characters that may belong to an escape that isn't whole yet, or to half a pair of them.
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?$")


def as_template_function(name: str, description: str | None) -> dict[str, Any]:
    """A custom tool as chat templates show it."""
    about = {"description": description} if description is not None else {}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters()}}


def parameters() -> dict[str, Any]:
    """The schema of every custom tool's function."""
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": _ABOUT_INPUT}},
        "required": [INPUT],
        "additionalProperties": False,
    }


def to_function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a custom tool (a message's) as one of a function."""
    custom = call["custom"]
    arguments = json.dumps({INPUT: custom["input"]}, ensure_ascii=False)
    function = {"name": custom["name"], "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


class CustomToolCalls:
    """Turns calls of custom tools, among an output's parts, into names and texts.

    Their arguments, `{"input": "..."}`, become the text in them, piece by piece. Arguments of
    another shape, which a model may write that no grammar holds, become the text as they are.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._call = -1
        self._buffer = ""
        self._state = "head"

    def push(self, parts: list[Part], *, is_final: bool) -> list[Part]:
        """The same parts, with calls of custom tools as such."""
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
        """What is certain of the JSON string that is being read."""
        end = _closing_quote(self._buffer)
        if end is not None:
            text, self._buffer, self._state = self._buffer[:end], "", "past"
            return _decoded(text)
        half = _HIGH_SURROGATE.search(self._buffer) or _odd_escape(self._buffer)
        cut = half if isinstance(half, int) else half.start() if half else len(self._buffer)
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return _decoded(text)

    def _flush(self) -> list[Part]:
        """The end of a call: what was no `{"input": "..."}` is text as it is."""
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
    """Where an escape begins that isn't whole; None where all are."""
    match = _ESCAPE.search(text)
    if match is None:
        return None
    num_backslashes = len(text[: match.start()]) - len(text[: match.start()].rstrip("\\"))
    return match.start() if num_backslashes % 2 == 0 else None


def _decoded(text: str) -> str:
    """The inside of a JSON string; what is none stays as it is."""
    if "\\" not in text:
        return text
    try:
        value = str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _single_string_argument(arguments: str) -> str:
    """The one text in an object, whatever it's called; else the arguments as they are."""
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(decoded, dict) and len(decoded) == 1:
        (value,) = decoded.values()
        if isinstance(value, str):
            return value
    return decoded if isinstance(decoded, str) else arguments
