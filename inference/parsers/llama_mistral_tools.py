"""Formats of Llama 3 and Mistral: JSON objects, or function names with JSON arguments."""

from __future__ import annotations

import re
from typing import ClassVar

from inference.parsers.json_stream import ValueScanner
from inference.parsers.json_tools import ObjectListParser
from inference.parsers.tool_grammar import ToolCallFormat
from inference.parsers.tool_parser import ToolCallParser


class Llama3JsonParser(ToolCallParser):
    """`{"name": ..., "parameters": {...}}`; several calls are separated with `; `.

    After other text, an object is a call only if it names one of the request's functions, since
    answers may contain JSON.
    """

    name = "llama3_json"
    template_marks: ClassVar[tuple[str, ...]] = ("dictionary of argument name and its value",)
    markers = ("<|python_tag|>",)
    layout = ToolCallFormat(
        call_start='{"name": "NAME", "parameters": ', call_end="}", separator="; "
    )

    _has_text = False

    def _text(self) -> bool:
        self._opening = self._find_marker("{", *self.markers)
        if self._opening == "{":
            self._buffer, self._opening = "{" + self._buffer, ""
            return self._goto(self._call_object)
        return bool(self._opening) and self._goto(self._call_object)

    def _call_object(self) -> bool:
        return self._parse_object(self._opening, self._between)

    def _is_function(self, name: str) -> bool:
        free = bool(self._opening) or not self._has_text or not self.functions
        return free or name in self.functions

    def _emit(self, text: str) -> None:
        self._has_text = self._has_text or bool(text.strip())
        super()._emit(text)

    def _between(self) -> bool:
        self._opening = self._gap = ""
        rest = self._buffer.lstrip("; \t\r\n")
        if not rest and not self._is_finished:
            return False
        if rest.startswith("{"):
            self._buffer = rest
            return self._goto(self._call_object)
        return self._goto(self._text)

    def _after_failure(self) -> bool:
        """Return the whole object as content: objects nested in it are not calls either."""
        self._scanner = ValueScanner()
        if len(self._no_call) > 1 and self._scanner.feed(self._no_call) is None:
            return self._goto(self._other_object)
        return self._goto(self._text)

    def _other_object(self) -> bool:
        end = self._scanner.feed(self._buffer)
        size = len(self._buffer) if end is None else end
        self._emit(self._buffer[:size])
        self._buffer = self._buffer[size:]
        return end is not None and self._goto(self._text)


# -- Mistral's formats: a list of objects, or (newer) function names with their arguments.


OPEN = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*(?P<name>[\w.-]{1,64})(\[CALL_ID\][A-Za-z0-9]*)?\s*(\[ARGS\])?\s*(?=\{)")


class MistralParser(ObjectListParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`; also parses `[TOOL_CALLS]name{...}`."""

    name = "mistral"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN,)
    openers = (OPEN,)
    markers = (OPEN, "[ARGS]", "[CALL_ID]")
    layout = ToolCallFormat(
        open=f"{OPEN}[",
        call_start='{"name": "NAME", "arguments": ',
        call_end="}",
        separator=", ",
        close="]",
        trigger=OPEN,
    )

    def _parse_without_list(self) -> bool:
        self._state = self._named
        return True

    def _named(self) -> bool:
        header = self._header(_NAME)
        if header is None:
            return False
        if header is False:
            return self._fail(self._opening)
        self._call(header["name"])
        self._state = self._bare_arguments
        return True

    def _bare_arguments(self) -> bool:
        return self._in_value(self._after_arguments)

    def _after_arguments(self) -> bool:
        self._state = self._text
        return True


class MistralNamedParser(MistralParser):
    """Mistral's newer models, whose enforced calls are `[TOOL_CALLS]name[ARGS]{...}`."""

    name = "mistral_named"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN, "[ARGS]")
    layout = ToolCallFormat(call_start=f"{OPEN}NAME[ARGS]", call_end="", separator="", trigger=OPEN)
