"""Base of formats in which tags delimit each parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal

from inference.parsers.json_stream import ValueScanner
from inference.parsers.parameter_schemas import ParameterSchema
from inference.parsers.state_machine import partial_suffix_length
from inference.parsers.tool_grammar import (
    ToolFunction,
    checked_key,
    json_value,
    lark_literal,
    lark_text_until,
    quoted,
    raw_input,
    text_pattern,
)
from inference.parsers.tool_parser import MAX_HEADER, ToolCallParser
from inference.parsers.tool_values import coerce_to_schema

#: Pattern of a parameter's name in a tag.
KEY = re.compile(r"[^<>\"\n]{1,128}")
#: Maximum number of quoted calls in one output's values: each may cause the rest to be rescanned.
MAX_QUOTED_CALLS = 64


class TaggedParser(ToolCallParser):
    """Streams strings; parses other values, once complete, by the function's schema.

    Attributes:
        openers: texts that begin a call or several. function_tag: matches the tag with the
            function's `name`.
        function_mark: beginning of `function_tag`, in an opener or after another call.
        parameter_tag: matches a parameter's opening tag (`key`; `text` is "true" or "false" if the
            model says whether the value is text) or the function's end.
        value_ends: texts that end a value: first its closing tag, then beginnings of
            `parameter_tag`, which end it if the closing tag is missing.
        closers: texts that may follow a call. line_breaks: whether one line break on each side of a
            value is dropped.
    """

    openers: ClassVar[tuple[str, ...]]
    function_mark: ClassVar[str] = ""
    function_tag: ClassVar[re.Pattern[str]]
    parameter_tag: ClassVar[re.Pattern[str]]
    value_ends: ClassVar[tuple[str, ...]]
    line_breaks: ClassVar[bool] = False

    _function: ToolFunction | None = None
    _parameter: ParameterSchema | None = None
    _num_values = 0
    _streams = False
    _as_text: str | None = None

    def _text(self) -> bool:
        self._opening = self._find_marker(*self.openers)
        if not self._opening:
            return False
        if self._opening == self.function_mark:
            self._buffer, self._opening = self._opening + self._buffer, ""
        self._state = self._function_tag
        return True

    def _function_tag(self) -> bool:
        repeated = self._skip_repeated(
            [opener for opener in self.openers if opener != self.function_mark]
        )
        if repeated is not False:
            return bool(repeated)
        header = self._header(self.function_tag)
        if header is None:
            return False
        if header is False:
            if not self._opening:  # only the tag: don't parse it again
                self._opening, self._buffer = self._buffer[:1], self._buffer[1:]
            return self._fail(self._opening)
        name = header["name"].strip()
        self._function = self.functions.get(name)
        self._call(name)
        self._num_values = 0
        self._state = self._parameter_tag
        return True

    def _parameter_tag(self) -> bool:
        header = self._header(self.parameter_tag)
        if header is None:
            return False
        if header is False or header["key"] is None:
            if header or not self._is_finished:
                self._arguments("}" if self._num_values else "{}")
            self._state = self._after_call_tags
            return True
        key = header["key"].strip()
        self._as_text = header.groupdict().get("text")
        self._arguments(f"{', ' if self._num_values else '{'}{quoted(key)}: ")
        self._num_values += 1
        self._parameter = self._schema_of(key)
        self._streams = self._as_text != "false" and self._may_be_text()
        if self._streams:
            self._arguments('"')
        self._state = self._value_start
        return True

    def _value_start(self) -> bool:
        """Drop a line break after the tag."""
        if self.line_breaks:
            if not self._buffer and not self._is_finished:
                return False
            self._buffer = self._buffer.removeprefix("\n")
        self._state = self._value
        return True

    def _schema_of(self, key: str) -> ParameterSchema | None:
        return None if self._function is None else self._function.schema.property(key)

    def _may_be_text(self) -> bool:
        """Whether the value is plain text by its schema, or because the model says so."""
        if self._parameter is None:
            return True
        if self._as_text == "true":
            return "string" in self._parameter.types
        return self._parameter.types == {"string"}

    def _value(self) -> bool:
        end = self._end_of_value()
        if end is None and not self._is_finished:
            return False
        position, mark = end or (len(self._buffer), "")
        value = self._buffer[:position]
        self._buffer = self._buffer[position:]
        self._search_from, self._num_repeated, self._doubtful_end = 0, 0, None
        self._quoted_depth, self._quoted_end = 0, None
        self._json, self._num_scanned = None, 0
        while self._buffer.lstrip().startswith(self.value_ends[0]):  # may be repeated
            self._buffer = self._buffer.lstrip().removeprefix(self.value_ends[0])
        if self.line_breaks and not mark.startswith("\n"):
            value = value.removesuffix("\n")
        if self._streams:
            self._arguments(quoted(value)[1:-1] + ('"' if end else ""))
        elif end:
            is_json = self._as_text == "false"
            self._arguments(coerce_to_schema(value, self._parameter, is_json=is_json))
        self._state = self._parameter_tag if end else self._text
        return True

    #: Offset from which to search for the value's end.
    _search_from = 0
    #: Offset and text of the first possible end, which counts if no better one follows.
    _doubtful_end: tuple[int, str] | None = None
    #: Number of open calls quoted inside the value.
    _quoted_depth = 0
    #: Offset and text of the first end of a value in a quoted call. It ends the outer value if the
    #: quoted call turns out to have no end.
    _quoted_end: tuple[int, str] | None = None
    #: Number of quoted calls in values so far.
    _num_quoted = 0
    #: Number of characters after the current mark that repeat it.
    _num_repeated = 0
    #: Scans a JSON value, of which `_num_scanned` characters were processed, for its end.
    _json: ValueScanner | None = None
    _json_is_open = False
    _num_scanned = 0

    def _end_of_value(self) -> tuple[int, str] | None:
        """Return the value's end as the offset and text of the mark there; None while it is open.

        A value may contain the marks themselves, so a mark ends it only if a valid continuation of
        the call follows, or if no such mark precedes the next call or the end of the text. A value
        may also contain quoted calls, whose marks don't end it.
        """
        openers = (*self.openers, *filter(None, (self.function_mark,)))
        marks = _any_of((*self.value_ends, *openers))
        while (match := marks.search(self._buffer, self._search_from)) is not None:
            position, mark = match.start(), match[0]
            after: int | None = match.end()
            if mark in self.value_ends:
                verdict = self._ends_value(mark, position)
                if verdict == "end" and not self._quoted_depth:
                    return position, mark
                if verdict == "end":
                    after = self._skip_quoted_value(mark, position)
                elif verdict == "unsure" and not self._is_finished:
                    after = None
                elif verdict == "doubtful" and not self._quoted_depth:
                    self._doubtful_end = self._doubtful_end or (position, mark)
            elif not self._streams and self._is_open_json(position):
                pass  # inside a JSON string
            elif self._doubtful_end is not None:
                break
            else:
                after = self._skip_quoted_opening(mark, position)
            if after is None:
                self._stream_value(position)
                return None
            self._search_from = after + self._num_repeated
            self._num_repeated = 0
        if match is not None or self._is_finished:
            return self._doubtful_end or self._quoted_end
        keep = partial_suffix_length(self._buffer, (*self.value_ends, *openers))
        self._search_from = max(self._search_from, len(self._buffer) - keep)
        self._stream_value(len(self._buffer) - keep)
        return None

    def _skip_quoted_opening(self, mark: str, position: int) -> int | None:
        """Return the offset after a quoted call's opener, and after its function tag and first
        parameter tag if these follow; None while more text is needed.
        """
        after = position + len(mark)
        if self._num_quoted >= MAX_QUOTED_CALLS:
            return after
        end = position + 2 * MAX_HEADER
        if len(self._buffer) < end and not self._is_finished:
            return None
        start = position if mark == self.function_mark else after
        function = self.function_tag.match(self._buffer, start, end)
        header = function and self.parameter_tag.match(self._buffer, function.end(), end)
        if not header or header["key"] is None:
            return after
        self._quoted_depth, self._num_quoted = self._quoted_depth + 1, self._num_quoted + 1
        return header.end()

    def _skip_quoted_value(self, mark: str, position: int) -> int | None:
        """Return the offset after a quoted call's value, and after the call's end or next
        parameter tag; None while more text is needed.
        """
        after = position + self._num_repeated
        if mark == self.value_ends[0]:
            after += len(mark)
        end = after + 2 * MAX_HEADER
        if len(self._buffer) < end and not self._is_finished:
            return None
        self._quoted_end, self._num_repeated = self._quoted_end or (position, mark), 0
        header = self.parameter_tag.match(self._buffer, after, end)
        if header is not None and header["key"] is not None:
            return header.end()
        self._quoted_depth -= 1
        after = after if header is None else header.end()
        window = self._buffer[after:end]
        rest = window.lstrip()
        while closer := next(filter(rest.startswith, self.closers), ""):
            rest = rest.removeprefix(closer).lstrip()
        return after + len(window) - len(rest)

    def _ends_value(self, mark: str, position: int) -> Literal["end", "doubtful", "no", "unsure"]:
        if not self._streams and self._is_open_json(position):
            return "doubtful"
        after = position + len(mark)
        if mark != self.value_ends[0]:
            header = self.parameter_tag.match(self._buffer, position, position + MAX_HEADER)
            if header is None:
                return "unsure" if len(self._buffer) < position + MAX_HEADER else "no"
            if header["key"] is not None:
                is_parameter = (
                    self._function is None or self._schema_of(header["key"].strip()) is not None
                )
                return "end" if is_parameter else "doubtful"
            after = max(header.end(), after)
        goes_on = self._goes_on(after)
        return "unsure" if goes_on is None else "end" if goes_on else "doubtful"

    def _goes_on(self, position: int) -> bool | None:
        """Whether the call continues or ends validly here; None while more text is needed."""
        value_end = self.value_ends[0]
        marks = (*self.value_ends, *self.closers, *self.openers, self.function_mark)
        while True:
            start = position + self._num_repeated
            window = self._buffer[start : start + MAX_HEADER]
            rest = window.lstrip()
            if not rest.startswith(value_end):
                break
            self._num_repeated += len(window) - len(rest) + len(value_end)
        may_grow = len(window) < MAX_HEADER and not self._is_finished
        if not rest:
            return None if may_grow else len(window) < MAX_HEADER
        if self.parameter_tag.match(rest) or any(mark and rest.startswith(mark) for mark in marks):
            return True
        if any(mark.startswith(rest) for mark in marks):
            return None if may_grow else True
        return None if may_grow and rest.startswith("<") and ">" not in rest else False

    def _is_open_json(self, position: int) -> bool:
        """Whether the value so far is an unclosed JSON string, list or object."""
        text = self._buffer[self._num_scanned : position]
        if self._json is None:
            text = text.lstrip()
            self._json = ValueScanner()
            self._json_is_open = text.startswith(("{", "[", '"'))
        self._num_scanned = position
        self._json_is_open = self._json_is_open and self._json.feed(text) is None
        return self._json_is_open

    def _stream_value(self, end: int) -> None:
        """Emit the text before `end`, which no further text can change."""
        if not self._streams or self._doubtful_end is not None or self._quoted_end is not None:
            return
        if self.line_breaks and self._buffer[:end].endswith("\n"):
            end -= 1
        self._arguments(quoted(self._buffer[:end])[1:-1])
        self._buffer = self._buffer[end:]
        self._search_from = max(0, self._search_from - end)

    def _after_call_tags(self) -> bool:
        """Consume closing tags, each optional, up to text or another call."""
        for mark in self.closers:
            has_mark = self._skip_text(mark)
            if has_mark is None:
                return False
            if has_mark:
                return True
        if self.function_mark:
            rest = self._buffer.lstrip()
            if rest.startswith(self.function_mark):
                self._buffer, self._opening = rest, ""
                self._state = self._function_tag
                return True
            if not self._is_finished and self.function_mark.startswith(rest):
                return False
        self._state = self._text
        return True


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for any of the marks; the longest one at a position matches."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


class TaggedArguments:
    """Grammar rules for parameters in tags, in the schema's order; optional ones may be missing.

    Args:
        before: opening tag, with KEY for the name and TEXT for whether the value is text ("true",
            "false").
        after: closing tag.
    """

    def __init__(self, prefix: str, suffix: str) -> None:
        self._prefix, self._suffix = prefix, suffix

    def __call__(self, rule: str, function: ToolFunction, special: Mapping[str, int]) -> list[str]:
        """Return the rules. Raises `InvalidRequest` for a name that a tag can't contain."""
        forms: list[str] = []
        rules: list[str] = []
        for number, (properties, required) in enumerate(function.schema.forms):
            names = {key: f"{rule}_{number}_{index}" for index, key in enumerate(properties)}
            parts = [name if key in required else f"{name}?" for key, name in names.items()]
            forms.append(" ".join(parts) or '""')
            for key, name in names.items():
                rules += self._parameter(name, key, properties[key], function, special)
        return [f"{rule}: {' | '.join(forms)}", *rules]

    def _parameter(
        self, rule: str, key: str, schema: Any, function: ToolFunction, special: Mapping[str, int]
    ) -> list[str]:
        """Return rules for tags around a value that `coerce_to_schema` accepts."""
        parameter, value = function.schema.property(key), function.schema.nested(schema)
        as_text = parameter is None or parameter.is_text
        prefix = self._prefix.replace("KEY", checked_key(key, KEY))
        opening = lark_literal(prefix.replace("TEXT", "true" if as_text else "false"), special)
        closing = lark_literal(self._suffix, special)
        text = f"{rule}_text"
        if function.grammar:
            return [f"{rule}: {opening} {text} {closing}", *raw_input(text, function)]
        if value.choices:
            written = (
                choice if as_text and isinstance(choice, str) else json.dumps(choice)
                for choice in value.choices
            )
            choices = " | ".join(lark_literal(choice, special) or '""' for choice in written)
            return [f"{rule}: {opening} ({choices}) {closing}"]
        if not as_text:
            return [f"{rule}: {opening} {text} {closing}", json_value(text, value, function)]
        pattern = text_pattern(value, function)
        name, rules = lark_text_until(self._suffix, text, special, pattern)
        null = f' | "null" {closing}' if "null" in value.types else ""
        return [f"{rule}: {opening} ({name}{null})", *rules]
