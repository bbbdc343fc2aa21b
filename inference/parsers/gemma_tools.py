"""Gemma's ways: `call:name{key:value,...}` with a mark around each string."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from inference.parsers.custom_tools import INPUT
from inference.parsers.state_machine import partial_suffix_length
from inference.parsers.tool_grammar import (
    ToolCallFormat,
    ToolFunction,
    checked_key,
    lark_literal,
    lark_text_until,
    quoted,
    raw_input,
)
from inference.parsers.tool_parser import ToolCallParser
from inference.parsers.tool_values import (
    ValueEnd,
    coerce_to_schema,
    json_types,
    property_schema,
    read_value,
)

_KEY = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_HEADER = re.compile(r"\s*(?:call)?:\s*(?P<name>[^\s{}<>|:]{1,128})\s*\{")
_RULE_OF_TYPE = {
    "string": "gemma_string",
    "integer": "GEMMA_INTEGER",
    "number": "GEMMA_NUMBER",
    "boolean": "gemma_boolean",
    "array": "gemma_list",
    "object": "gemma_dict",
}


class GemmaArguments:
    """Grammar rules of `key:value` pairs; a string stands between two marks.

    Args:
        mark: around strings.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def __call__(self, rule: str, function: ToolFunction, special: Mapping[str, int]) -> list[str]:
        """Required parameters in their order, then any of the others."""
        if function.grammar:
            mark, text = lark_literal(self._mark, special), f"{rule}_text"
            opening = quoted(f"{INPUT}:")
            return [f"{rule}: {opening} {mark} {text} {mark}", *raw_input(text, function)]
        properties = function.parameters.get("properties") or {}
        required = [key for key in properties if key in (function.parameters.get("required") or [])]
        others = [key for key in properties if key not in required]
        parts = [self._pair(function, key, special) for key in required]
        more = [self._pair(function, key, special) for key in others]
        if not parts:  # the first one has no comma before it
            tails = [f"{part}{_rest(more[place + 1 :])}" for place, part in enumerate(more)]
            return [f"{rule}: {' | '.join([*tails, quoted('')])}"]
        comma = ' "," '
        return [f"{rule}: {comma.join(parts)}{_rest(more)}"]

    def shared(self, special: Mapping[str, int]) -> Sequence[str]:
        """Rules for values of each type."""
        mark = lark_literal(self._mark, special)
        text, rules = lark_text_until(self._mark, "gemma_text", special)
        return (
            f"gemma_string: {mark} {text}",
            *rules,
            "GEMMA_INTEGER: /-?(0|[1-9][0-9]{0,17})/",
            r"GEMMA_NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
            'gemma_boolean: "true" | "false"',
            'gemma_list: "[" (gemma_value ("," gemma_value)*)? "]"',
            'gemma_dict: "{" (gemma_item ("," gemma_item)*)? "}"',
            'gemma_item: GEMMA_KEY ":" gemma_value',
            "GEMMA_KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
            'gemma_value: gemma_string | GEMMA_NUMBER | gemma_boolean | "null"'
            " | gemma_list | gemma_dict",
        )

    def _pair(self, function: ToolFunction, key: str, special: Mapping[str, int]) -> str:
        value = self._value(property_schema(function, key), special)
        return f"{quoted(f'{checked_key(key, _KEY)}:')} {value}"

    def _value(self, schema: Any, special: Mapping[str, int]) -> str:
        if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
            choices = (self._written(item) for item in schema["enum"])
            return f"({' | '.join(lark_literal(choice, special) for choice in choices)})"
        kinds = json_types(schema)
        return _RULE_OF_TYPE.get(kinds[0], "gemma_value") if len(kinds) == 1 else "gemma_value"

    def _written(self, value: Any) -> str:
        return f"{self._mark}{value}{self._mark}" if isinstance(value, str) else json.dumps(value)


def _rest(parts: list[str]) -> str:
    return "".join(f' ("," {part})?' for part in parts)


class Gemma4Parser(ToolCallParser):
    """Gemma 4. Strings stream; other values come when they are whole.

    Attributes:
        opener, closer: around a call. mark: on both sides of a string.
        typed_strings: a string may stand for a value of another type that its schema names.
    """

    name = "gemma4"
    template_marks: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    opener: ClassVar[str] = "<|tool_call>"
    closer: ClassVar[str] = "<tool_call|>"
    mark: ClassVar[str] = '<|"|>'
    markers = (opener, closer, mark)
    layout = ToolCallFormat(
        call_start=f"{opener}call:NAME{{",
        call_end=f"}}{closer}",
        separator="",
        trigger=opener,
        arguments=GemmaArguments(mark),
        shared=GemmaArguments(mark).shared,
    )

    _function: ToolFunction | None = None
    _schema: Any = None
    _num_values = 0
    _read = ""
    _value_end: ValueEnd

    def _text(self) -> bool:
        return bool(self._find_marker(self.opener)) and self._goto(self._name)

    def _name(self) -> bool:
        header = self._header(_HEADER)
        if header is None:
            return False
        if header is False:
            return self._fail(self.opener)
        self._function = self.functions.get(header["name"])
        self._call(header["name"])
        self._num_values = 0
        return self._goto(self._key)

    def _key(self) -> bool:
        """Before a parameter's name, or the end of all."""
        mark = re.escape(self.mark)
        header = self._header(
            re.compile(
                rf"[\s,]*(?:(?:{mark})?(?P<key>[^\s,:{{}}\[\]<>]{{1,128}})(?:{mark})?\s*:\s*|(?P<end>\}}))"
            )
        )
        if header is None:
            return False
        if header is False or header["end"]:
            if header or not self._is_finished:
                self._arguments("}" if self._num_values else "{}")
            return self._goto(self._close)
        self._arguments(f"{', ' if self._num_values else '{'}{quoted(header['key'])}: ")
        self._num_values += 1
        self._schema = property_schema(self._function, header["key"])
        return self._goto(self._value_start)

    def _value_start(self) -> bool:
        if self._buffer.startswith(self.mark) and self._is_text():
            self._buffer = self._buffer[len(self.mark) :]
            self._arguments('"')
            return self._goto(self._string)
        if not self._is_finished and self.mark.startswith(self._buffer):
            return False
        self._value_end, self._read = ValueEnd(self.mark), ""
        return self._goto(self._value)

    def _is_text(self) -> bool:
        """Whether a string is one by its schema too."""
        kinds = json_types(self._schema)
        return not kinds or "string" in kinds

    def _string(self) -> bool:
        place = self._buffer.find(self.mark)
        keep = (
            0
            if self._is_finished or place >= 0
            else partial_suffix_length(self._buffer, (self.mark,))
        )
        size = place if place >= 0 else len(self._buffer) - keep
        self._arguments(quoted(self._buffer[:size])[1:-1] + ('"' if place >= 0 else ""))
        self._buffer = (
            self._buffer[size:].removeprefix(self.mark) if place >= 0 else self._buffer[size:]
        )
        if place >= 0:
            return self._goto(self._key)
        return self._is_finished and self._goto(self._text)

    def _value(self) -> bool:
        size, found = self._value_end.feed(self._buffer)
        self._read += self._buffer[:size]
        self._buffer = self._buffer[size:]
        if found:
            self._arguments(self._as_json(self._read.strip()))
            return self._goto(self._key)
        if not self._is_finished:
            return False
        self._buffer = ""
        return self._goto(self._text)

    def _as_json(self, text: str) -> str:
        if text.startswith(self.mark) and text.endswith(self.mark):
            inner = text[len(self.mark) : -len(self.mark)]
            if self.mark not in inner:
                return coerce_to_schema(inner, self._schema)
        value = read_value(text, self.mark)
        kinds = json_types(self._schema)
        if isinstance(value, dict | list) or not kinds:
            return json.dumps(value, ensure_ascii=False)
        return coerce_to_schema(text, self._schema)

    def _close(self) -> bool:
        if self._skip_text(self.closer) is None:
            return False
        return self._goto(self._text)


class FunctionGemmaParser(Gemma4Parser):
    """FunctionGemma: the same with other marks."""

    name = "functiongemma"
    template_marks: ClassVar[tuple[str, ...]] = ("<start_function_call>",)
    opener: ClassVar[str] = "<start_function_call>"
    closer: ClassVar[str] = "<end_function_call>"
    mark: ClassVar[str] = "<escape>"
    markers = (opener, closer, mark)
    layout = ToolCallFormat(
        call_start=f"{opener}call:NAME{{",
        call_end=f"}}{closer}",
        separator="",
        trigger=opener,
        arguments=GemmaArguments(mark),
        shared=GemmaArguments(mark).shared,
    )
