"""Gemma's formats: `call:name{key:value,...}`, with a mark on both sides of each string."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from inference.parsers.custom_tools import INPUT
from inference.parsers.parameter_schemas import ALL_TYPES, ParameterSchema
from inference.parsers.state_machine import partial_suffix_length
from inference.parsers.tool_grammar import (
    ToolCallFormat,
    ToolFunction,
    checked_key,
    in_any_number,
    json_value,
    lark_literal,
    lark_text_until,
    quoted,
    raw_input,
    text_pattern,
)
from inference.parsers.tool_parser import ToolCallParser
from inference.parsers.tool_values import ValueEnd, coerce_to_schema, read_value

_KEY = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_HEADER = re.compile(r"\s*(?:call)?:\s*(?P<name>[^\s{}<>|:]{1,128})\s*\{")
#: Grammar of a value of any type; `MARK` is replaced by the mark around strings.
_ANY_VALUE = (
    'gemma_list: "[" (gemma_value ("," gemma_value)*)? "]"',
    'gemma_dict: "{" (gemma_item ("," gemma_item)*)? "}"',
    'gemma_item: GEMMA_KEY ":" gemma_value',
    "GEMMA_KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
    r"GEMMA_NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
    'gemma_value: gemma_string | GEMMA_NUMBER | "true" | "false" | "null" | gemma_list'
    " | gemma_dict",
)


class GemmaArguments:
    """Grammar rules for `key:value` pairs with a mark on both sides of each string.

    Args:
        mark: text on both sides of a string.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def __call__(self, rule: str, function: ToolFunction, special: Mapping[str, int]) -> list[str]:
        """Return the rule: required parameters in order, then any of the others."""
        if function.grammar:
            mark, text = lark_literal(self._mark, special), f"{rule}_text"
            opening = quoted(f"{INPUT}:")
            return [f"{rule}: {opening} {mark} {text} {mark}", *raw_input(text, function)]
        values = _GemmaValues(rule, self._mark, function, special)
        return [f"{rule}: {values.pairs(function.schema)}", *values.rules]

    def shared(self, special: Mapping[str, int]) -> Sequence[str]:
        """Return the rules for values of any type."""
        text, rules = lark_text_until(self._mark, "gemma_text", special)
        return (f"gemma_string: {lark_literal(self._mark, special)} {text}", *rules, *_ANY_VALUE)


class _GemmaValues:
    """Writes rules for the values that a function's schema allows, one per nested schema."""

    def __init__(
        self, rule: str, mark: str, function: ToolFunction, special: Mapping[str, int]
    ) -> None:
        self.rules: list[str] = []
        self._names: dict[int, str] = {}
        self._rule, self._mark, self._function, self._special = rule, mark, function, special

    def pairs(self, schema: ParameterSchema) -> str:
        """Return an object's pairs, without its braces."""
        forms = []
        for properties, required in schema.forms:
            pairs = {
                key: f"{quoted(f'{checked_key(key, _KEY)}:')} {self.value(schema.nested(value))}"
                for key, value in properties.items()
            }
            forms.append(in_any_number(pairs, required, ","))
        return " | ".join(forms)

    def value(self, schema: ParameterSchema) -> str:
        """Return the name of a value's rule."""
        name = self._names.get(id(schema))
        if name is None:
            name = self._names[id(schema)] = f"{self._rule}_{len(self._names)}"
            self.rules.append(f"{name}: {self._alternatives(name, schema)}")
        return name

    def _alternatives(self, name: str, schema: ParameterSchema) -> str:
        if schema.choices:
            texts = (self._written(choice) for choice in schema.choices)
            return " | ".join(lark_literal(text, self._special) for text in texts)
        if schema.types == ALL_TYPES:
            return "gemma_value"
        options = schema.options
        if options:
            return " | ".join(self.value(option) for option in options)
        kinds = sorted(schema.types - ({"integer"} if "number" in schema.types else set()))
        return " | ".join(self._of_type(kind, name, schema) for kind in kinds)

    def _of_type(self, kind: str, name: str, schema: ParameterSchema) -> str:
        if kind == "string":
            pattern = text_pattern(schema, self._function)
            text, rules = lark_text_until(self._mark, f"{name}_text", self._special, pattern)
            self.rules += rules
            return f"{lark_literal(self._mark, self._special)} {text}"
        if kind == "boolean":
            return '"true" | "false"'
        if kind == "null":
            return '"null"'
        if kind == "array":
            items = schema.keyword("items")
            if not isinstance(items, dict):
                return "gemma_list"
            return f'"[" {self._items(self.value(schema.nested(items)), schema)} "]"'
        if kind == "object":
            has_properties = any(properties for properties, _ in schema.forms)
            return f'"{{" ({self.pairs(schema)}) "}}"' if has_properties else "gemma_dict"
        bounds = {key: schema.keyword(key) for key in _BOUNDS if schema.keyword(key) is not None}
        number = ParameterSchema({"type": kind, **bounds})
        self.rules.append(json_value(f"{name}_{kind}", number, self._function))
        return f"{name}_{kind}"

    def _items(self, item: str, schema: ParameterSchema) -> str:
        """Return the rule for as many items as the schema allows."""
        low, high = schema.keyword("minItems") or 0, schema.keyword("maxItems")
        if high == 0:
            return '""'
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        return f"{item} {more}" if low else f"({item} {more})?"

    def _written(self, value: Any) -> str:
        return f"{self._mark}{value}{self._mark}" if isinstance(value, str) else json.dumps(value)


class Gemma4Parser(ToolCallParser):
    """Gemma 4. Strings are streamed; other values are emitted once they are complete.

    Attributes:
        opener, closer: marks around a call. mark: text on both sides of a string.
        typed_strings: whether a string may encode a value of another type that its schema names.
    """

    name = "gemma4"
    template_marks: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    opener: ClassVar[str] = "<|tool_call>"
    closer: ClassVar[str] = "<tool_call|>"
    closers = (closer,)
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
    _parameter: ParameterSchema | None = None
    _num_values = 0
    _read = ""
    _value_end: ValueEnd
    _search_from = 0
    _doubtful_end: tuple[int, int] | None = None

    def _text(self) -> bool:
        self._opening = self._find_marker(self.opener)
        return bool(self._opening) and self._goto(self._name)

    def _name(self) -> bool:
        repeated = self._skip_repeated((self.opener,))
        if repeated is not False:
            return bool(repeated)
        header = self._header(_HEADER)
        if header is None:
            return False
        if header is False:
            return self._fail(self._opening)
        self._function = self.functions.get(header["name"])
        self._call(header["name"])
        self._num_values = 0
        return self._goto(self._key)

    def _key(self) -> bool:
        """Consume a parameter's name or the call's closing brace."""
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
        function = self._function
        self._parameter = None if function is None else function.schema.property(header["key"])
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
        """Whether the schema allows the value to be a string."""
        return self._parameter is None or "string" in self._parameter.types

    def _string(self) -> bool:
        """Stream a string, which may contain the mark itself.

        A mark ends the string only if the call continues after it, or if no later one does.
        """
        start, end = self._end_of_string()
        if end is None and not self._is_finished:
            if self._doubtful_end is None:
                self._arguments(quoted(self._buffer[:start])[1:-1])
                self._buffer, self._search_from = self._buffer[start:], 0
            return False
        self._search_from, self._doubtful_end = 0, None
        self._arguments(quoted(self._buffer[:start])[1:-1] + ('"' if end else ""))
        self._buffer = self._buffer[end:] if end else ""
        return self._goto(self._key if end else self._text)

    def _end_of_string(self) -> tuple[int, int | None]:
        """Return the ends of the string and of its mark.

        While the end is unknown: up to where the text contains no mark, and None.
        """
        mark = re.escape(self.mark)
        goes_on = re.compile(
            rf"(?:{mark}\s*)+(?=[,}}]|{re.escape(self.closer)}|(?:{mark})?[\w.-]{{1,128}}(?:{mark})?\s*:)"
        )
        may_go_on = re.compile(rf"(?:{mark}\s*)+[\w.-]{{0,128}}\s*")
        while (start := self._buffer.find(self.mark, self._search_from)) >= 0:
            match = goes_on.match(self._buffer, start)
            if match is not None:
                return start, match.end()
            match = may_go_on.match(self._buffer, start)
            rest = self._buffer[match.end() :] if match else ""
            if not self._is_finished and (
                self.mark.startswith(rest) or self.closer.startswith(rest)
            ):
                return start, None
            self._doubtful_end = self._doubtful_end or (start, start + len(self.mark))
            self._search_from = start + len(self.mark)
        if self._is_finished:
            return self._doubtful_end or (len(self._buffer), None)
        keep = partial_suffix_length(self._buffer, (self.mark,))
        self._search_from = len(self._buffer) - keep
        return self._search_from, None

    def _value(self) -> bool:
        size, is_complete = self._value_end.feed(self._buffer)
        self._read += self._buffer[:size]
        self._buffer = self._buffer[size:]
        if is_complete:
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
                return coerce_to_schema(inner, self._parameter)
        value = read_value(text, self.mark)
        if isinstance(value, dict | list) or self._parameter is None:
            return json.dumps(value, ensure_ascii=False)
        return coerce_to_schema(text, self._parameter)

    def _close(self) -> bool:
        if self._skip_text(self.closer) is None:
            return False
        return self._goto(self._text)


class FunctionGemmaParser(Gemma4Parser):
    """FunctionGemma: Gemma 4's format with different marks."""

    name = "functiongemma"
    template_marks: ClassVar[tuple[str, ...]] = ("<start_function_call>",)
    opener: ClassVar[str] = "<start_function_call>"
    closer: ClassVar[str] = "<end_function_call>"
    closers = (closer,)
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
