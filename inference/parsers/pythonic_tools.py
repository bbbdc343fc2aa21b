"""Python call syntax, `[f(a=1, b="x"), g()]`, with or without marks around the list."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from inference.parsers.custom_tools import INPUT
from inference.parsers.json_tools import ObjectListParser
from inference.parsers.parameter_schemas import ParameterSchema
from inference.parsers.state_machine import is_prefix
from inference.parsers.tool_grammar import (
    ToolCallFormat,
    ToolFunction,
    checked_key,
    in_any_number,
    json_value,
    quoted,
    quoted_input,
)
from inference.parsers.tool_parser import ToolCallParser
from inference.parsers.tool_values import LiteralScanner, literal_as_json

_CALL = r"(?P<name>[A-Za-z_][\w.-]{0,127})\("
_KEY = re.compile(r"[\s,]*(?:(?P<key>[A-Za-z_]\w{0,127})\s*=\s*|(?P<end>\)))")
_NAME = re.compile(r"[A-Za-z_]\w{0,127}")
_OBJECTS = re.compile(r"\[?\s*\{")


def _keywords(rule: str, function: ToolFunction, special: Mapping[str, int]) -> list[str]:
    """Return rules for `a=1, b="x"`: required parameters first, then optional ones."""
    if function.grammar:  # a JSON string is a valid Python string
        text = f"{rule}_text"
        return [f"{rule}: {_opening(INPUT)} {text}", *quoted_input(text, function)]
    forms: list[str] = []
    rules: list[str] = []
    for number, (properties, required) in enumerate(function.schema.forms):
        pairs = {}
        for index, (key, schema) in enumerate(properties.items()):
            value = f"{rule}_{number}_{index}"
            rules.append(_value_rule(value, function.schema.nested(schema), function))
            pairs[key] = f"{_opening(key)} {value}"
        forms.append(in_any_number(pairs, required, ", "))
    return [f"{rule}: {' | '.join(forms)}", *rules]


def _opening(key: str) -> str:
    return quoted(f"{checked_key(key, _NAME)}=")


def _value_rule(rule: str, schema: ParameterSchema, function: ToolFunction) -> str:
    """Return the rule of a value: JSON, which the parser accepts, with Python's bare constants."""
    if schema.choices:
        return f"{rule}: {' | '.join(quoted(repr_of(item)) for item in schema.choices)}"
    if schema.types == {"boolean"}:
        return f'{rule}: "True" | "False"'
    return json_value(rule, schema, function)


def repr_of(value: Any) -> str:
    """Write a JSON value as Python, with strings in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


class PythonicParser(ToolCallParser):
    """Llama 3.2: the whole answer is a list of calls. Each argument is emitted when complete.

    Attributes:
        first: matches the text up to the first call's parenthesis. next: matches the text between
            two calls, or after the last one (without `name`).
        follows: matches the text after an argument.
    """

    name = "pythonic"
    template_marks: ClassVar[tuple[str, ...]] = ("[func_name1(",)
    first: ClassVar[re.Pattern[str]] = re.compile(rf"\s*\[\s*{_CALL}")
    next: ClassVar[re.Pattern[str]] = re.compile(rf"\s*(?:,\s*{_CALL}|,?\s*\])")
    follows: ClassVar[re.Pattern[str]] = re.compile(
        rf"\s*(?:,\s*[A-Za-z_]\w*\s*=|,?\s*\)\s*(?:,\s*{_CALL}|,?\s*\]))"
    )
    layout = ToolCallFormat(
        open="[",
        call_start="NAME(",
        call_end=")",
        separator=", ",
        close="]",
        arguments=_keywords,
    )

    _function: ToolFunction | None = None
    _num_values = 0
    _key = ""
    _literal: LiteralScanner
    _read = ""

    def _text(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest and not self._is_finished:
            return False
        header = self._header(self.first) if rest.startswith("[") else False
        if header is None:
            return False
        if header is False:
            return self._goto(self._plain_text)
        return self._begin(header["name"])

    def _begin(self, name: str) -> bool:
        self._function = self.functions.get(name)
        self._call(name)
        self._num_values = 0
        return self._goto(self._keyword)

    def _broken(self) -> bool:
        """End a call whose continuation is invalid."""
        return self._goto(self._plain_text)

    def _end(self) -> bool:
        """Consume the text after the last call."""
        return self._goto(self._plain_text)

    def _keyword(self) -> bool:
        header = self._header(_KEY)
        if header is None:
            return False
        if header is False:
            return self._broken()
        if header["end"]:
            self._arguments("}" if self._num_values else "{}")
            return self._goto(self._between)
        self._arguments(f"{', ' if self._num_values else '{'}{quoted(header['key'])}: ")
        self._num_values += 1
        self._key = header["key"]
        self._literal, self._read = LiteralScanner(self.follows), ""
        return self._goto(self._value)

    def _value(self) -> bool:
        size, is_complete = self._literal.feed(self._buffer, is_final=self._is_finished)
        self._read += self._buffer[:size]
        self._buffer = self._buffer[size:]
        if not is_complete:
            return False
        schema = None if self._function is None else self._function.schema.property(self._key)
        self._arguments(literal_as_json(self._read, schema))
        return self._goto(self._keyword)

    def _between(self) -> bool:
        header = self._header(self.next)
        if header is None:
            return False
        if header is False or header["name"] is None:
            return self._end()
        return self._begin(header["name"])


class BracketedPythonicParser(PythonicParser):
    """A list of calls between two model-specific marks; other text may surround it.

    Attributes:
        opener, closer: the marks.
    """

    opener: ClassVar[str]
    closer: ClassVar[str]

    def _text(self) -> bool:
        self._opening = self._find_marker(self.opener)
        return bool(self._opening) and self._goto(self._first)

    def _first(self) -> bool:
        repeated = self._skip_repeated((self.opener,))
        if repeated is not False:
            return bool(repeated)
        header = self._header(self.first)
        if header is None:
            return False
        if header is False:
            return self._fail(self._opening)
        return self._begin(header["name"])

    def _broken(self) -> bool:
        return self._goto(self._text)

    def _end(self) -> bool:
        return self._goto(self._close)

    def _close(self) -> bool:
        if self._skip_text(self.closer) is None:
            return False
        return self._goto(self._text)


class Lfm2Parser(BracketedPythonicParser):
    """LFM2: `<|tool_call_start|>[f(a=1)]<|tool_call_end|>`."""

    name = "lfm2"
    template_marks: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>",)
    opener, closer = "<|tool_call_start|>", "<|tool_call_end|>"
    markers, closers = (opener, closer), (closer,)
    layout = ToolCallFormat(
        open=f"{opener}[",
        call_start="NAME(",
        call_end=")",
        separator=", ",
        close=f"]{closer}",
        trigger=opener,
        arguments=_keywords,
    )


class Olmo3Parser(BracketedPythonicParser):
    """Olmo 3: one call per line, `<function_calls>f(a=1)\\ng()</function_calls>`."""

    name = "olmo3"
    template_marks: ClassVar[tuple[str, ...]] = ("<function_calls>",)
    opener, closer = "<function_calls>", "</function_calls>"
    markers, closers = (opener, closer), (closer,)
    first = re.compile(rf"\s*{_CALL}")
    next = re.compile(rf"\s*(?:{_CALL}|(?=</function_calls>))")
    follows = re.compile(
        rf"\s*(?:,\s*[A-Za-z_]\w*\s*=|,?\s*\)\s*(?:\n\s*{_CALL}|</function_calls>))"
    )
    layout = ToolCallFormat(
        open=opener,
        call_start="NAME(",
        call_end=")",
        separator="\n",
        close=closer,
        trigger=opener,
        arguments=_keywords,
    )


class Llama4PythonicParser(PythonicParser, ObjectListParser):
    """Llama 4: the whole answer is the list, with or without two marks around it.

    JSON call objects are accepted too. Without the marks they must name one of the request's
    functions, since an answer may be JSON.
    """

    name = "llama4_pythonic"
    template_marks: ClassVar[tuple[str, ...]] = ("<|python_start|>",)
    markers = ("<|python_start|>", "<|python_end|>")
    openers = markers[:1]
    closers = markers[1:]

    def _text(self) -> bool:
        if self._num_calls:
            return self._plain_text()
        rest, mark = self._buffer.lstrip(), self.markers[0]
        if rest.startswith(mark):
            self._opening, self._buffer = mark, rest[len(mark) :]
            return self._goto(self._marked)
        if is_prefix(rest, self.openers) and not self._is_finished:
            return False
        return self._goto(self._marked if rest.startswith(("[", "{")) else self._plain_text)

    def _marked(self) -> bool:
        repeated = self._skip_repeated(self.openers) if self._opening else False
        if repeated is not False:
            return bool(repeated)
        rest = self._buffer.lstrip()
        if rest in ("", "[") and not self._is_finished:
            return False
        if _OBJECTS.match(rest):
            self._gap = self._buffer[: len(self._buffer) - len(rest)] if not self._opening else ""
            self._buffer = rest if not self._opening else self._buffer
            return self._goto(self._list_start)
        header = self._header(self.first)
        if header is None:
            return False
        if header is False:
            return self._fail(self._opening)
        return self._begin(header["name"])

    def _is_function(self, name: str) -> bool:
        return bool(self._opening.strip("[ \r\n\t")) or name in self.functions

    def _after_failure(self) -> bool:
        return self._goto(self._plain_text)

    def _end(self) -> bool:
        return self._goto(self._after_list)
