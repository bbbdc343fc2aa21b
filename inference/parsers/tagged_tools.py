"""Calls whose parameters stand in tags of their own: what all such ways of writing share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from inference.parsers.state_machine import find_first, partial_suffix_length
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
    coerce_to_schema,
    is_text,
    parse_lenient_json,
    property_schema,
)

#: A parameter's name in a tag.
KEY = re.compile(r"[^<>\"\n]{1,128}")


class TaggedParser(ToolCallParser):
    """Strings stream; other values come when they are whole, read by the function's schema.

    Attributes:
        openers: what begins a call, or several. function_tag: names the function (`name`).
        function_mark: what `function_tag` begins with, in an opener or after another call.
        parameter_tag: begins a parameter (`key`; `text`, where the model says whether the value
            is text: "true" or "false") or ends the function.
        value_ends: end a value; the first is its own tag, the others come where that is missing.
        unclosed: a tag (`key`) that ends a value whose own tag is missing, if it's a parameter's;
            `unclosed_mark` is what it begins with.
        closers: what may follow a call. line_breaks: whether one on each side of a value is none
            of it.
    """

    openers: ClassVar[tuple[str, ...]]
    function_mark: ClassVar[str] = ""
    function_tag: ClassVar[re.Pattern[str]]
    parameter_tag: ClassVar[re.Pattern[str]]
    value_ends: ClassVar[tuple[str, ...]]
    unclosed: ClassVar[re.Pattern[str] | None] = None
    unclosed_mark: ClassVar[str] = ""
    closers: ClassVar[tuple[str, ...]]
    line_breaks: ClassVar[bool] = False

    _function: ToolFunction | None = None
    _schema: Any = None
    _opening = ""
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
        header = self._header(self.function_tag)
        if header is None:
            return False
        if header is False:
            if not self._opening:  # the tag alone: don't look at it again
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
        self._schema = property_schema(self._function, key)
        known = self._schema is not None
        self._streams = is_text(self._schema) if known else self._as_text != "false"
        if self._streams:
            self._arguments('"')
        self._state = self._value_start
        return True

    def _value_start(self) -> bool:
        """A line break after the tag belongs to it."""
        if self.line_breaks:
            if not self._buffer and not self._is_finished:
                return False
            self._buffer = self._buffer.removeprefix("\n")
        self._state = self._value
        return True

    def _value(self) -> bool:
        place, mark = self._end_of_value()
        if place < 0 and not self._is_finished:
            return self._part_of_value()
        value = self._buffer[:place] if place >= 0 else self._buffer
        self._buffer = self._buffer[len(value) :]
        if mark == self.value_ends[0]:
            self._buffer = self._buffer.removeprefix(mark)
        if self.line_breaks and (place < 0 or mark in self.value_ends):
            value = value.removesuffix("\n")
        if self._streams:
            self._arguments(quoted(value)[1:-1] + ('"' if place >= 0 else ""))
        elif place >= 0:
            self._arguments(self._read_value(value))
        self._state = self._parameter_tag if place >= 0 else self._text
        return True

    def _read_value(self, value: str) -> str:
        if self._schema is None and self._as_text == "false":
            return parse_lenient_json(value)
        return coerce_to_schema(value, self._schema)

    def _end_of_value(self) -> tuple[int, str]:
        """Where the value ends and by what; -1 while it goes on."""
        place, mark = find_first(self._buffer, self.value_ends)
        if self.unclosed is None:
            return place, mark
        for found in self.unclosed.finditer(self._buffer):
            if 0 <= place < found.start():
                break
            if self._function is None or self._is_parameter(found["key"]):
                return found.start(), found[0]
        return place, mark

    def _is_parameter(self, key: str) -> bool:
        return property_schema(self._function, key.strip()) is not None

    def _part_of_value(self) -> bool:
        if not self._streams:
            return False
        ends = self.value_ends
        if self.line_breaks:
            ends += tuple(f"\n{end}" for end in ends)
        keep = partial_suffix_length(self._buffer, ends)
        if self.unclosed is not None:
            keep = max(keep, self._open_tag_at_end())
        part = self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(part) :]
        self._arguments(quoted(part)[1:-1])
        return False

    def _open_tag_at_end(self) -> int:
        """How many characters at the end may begin a tag that ends the value."""
        mark = self.unclosed_mark
        place = self._buffer.rfind(mark)
        tail = self._buffer[place + len(mark) :]
        if place >= 0 and ">" not in tail and "\n" not in tail and len(tail) <= 128:
            return len(self._buffer) - place
        return partial_suffix_length(self._buffer, (mark,))

    def _after_call_tags(self) -> bool:
        """Closing tags, each optional; perhaps another call."""
        for mark in self.closers:
            found = self._skip_text(mark)
            if found is None:
                return False
            if found:
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


class TaggedArguments:
    """Grammar rules of parameters in tags, in the schema's order; optional ones may be missing.

    Args:
        before: a parameter's tag, KEY for its name, TEXT for whether it's text ("true", "false").
        after: what closes it.
    """

    def __init__(self, before: str, after: str) -> None:
        self._prefix, self._suffix = before, after

    def __call__(self, rule: str, function: ToolFunction, special: Mapping[str, int]) -> list[str]:
        """The rules. Raises `InvalidRequest` for a name that a tag can't hold."""
        schema = function.parameters
        required = schema.get("required") or []
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts, rules = [], []
        for number, (key, value) in enumerate((schema.get("properties") or {}).items()):
            name = f"{rule}_{number}"
            parts.append(name if key in required else f"{name}?")
            string = isinstance(value, dict) and value.get("type") == "string"
            before = self._prefix.replace("KEY", checked_key(key, KEY))
            opening = lark_literal(before.replace("TEXT", "true" if string else "false"), special)
            closing = lark_literal(self._suffix, special)
            if function.grammar:
                rules += [f"{name}: {opening} {name}_text {closing}"]
                rules += raw_input(f"{name}_text", function)
            elif string and "enum" not in value:
                text, text_rules = lark_text_until(self._suffix, f"{name}_text", special)
                rules += [f"{name}: {opening} {text}", *text_rules]
            elif string:
                choices = " | ".join(lark_literal(str(choice), special) for choice in value["enum"])
                rules.append(f"{name}: {opening} ({choices}) {closing}")
            else:
                nested = {**value, **shared} if isinstance(value, dict) else {}
                nested["x-guidance"] = {
                    "whitespace_flexible": False,
                    "lenient": not function.strict,
                }
                rules.append(f"{name}: {opening} {name}_json {closing}")
                rules.append(f"{name}_json: %json {json.dumps(nested)}")
        return [f"{rule}: {' '.join(parts)}", *rules]


# -- GLM's ways, and others': a name, then pairs of tags for each parameter's name and value.


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Glm45Parser(TaggedParser):
    """GLM 4.5 and 4.6, a line for each part; 4.7's form without lines is read as well."""

    name = "glm45"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN, "<arg_key>")
    markers = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    openers = (OPEN,)
    function_tag = re.compile(r"\s*(?P<name>[\w.:-]{1,128})\s*(?=<arg_key>|</tool_call>)")
    parameter_tag = re.compile(
        r"\s*(?:<arg_key>(?P<key>[^<\n]{1,128})</arg_key>\s*<arg_value>|(?=</tool_call>))"
    )
    value_ends = ("</arg_value>", "<arg_key>", CLOSE)
    closers = (CLOSE,)
    layout = ToolCallFormat(
        call_start=f"{OPEN}NAME\n",
        call_end=CLOSE,
        trigger=OPEN,
        arguments=TaggedArguments("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    )


class Glm47Parser(Glm45Parser):
    """The same for models that write no line breaks, when calls are enforced."""

    name = "glm47"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN, "}<arg_key>")
    layout = ToolCallFormat(
        call_start=f"{OPEN}NAME",
        call_end=CLOSE,
        separator="",
        trigger=OPEN,
        arguments=TaggedArguments("<arg_key>KEY</arg_key><arg_value>", "</arg_value>"),
    )


class HyV3Parser(TaggedParser):
    """Hunyuan 3: a mark behind the name, and all calls between tags."""

    name = "hy_v3"
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_sep>", "<arg_key>")
    openers = ("<tool_calls>", OPEN)
    markers = (*openers, "</tool_calls>", CLOSE, "<tool_sep>", *Glm45Parser.markers[2:])
    function_mark = OPEN
    function_tag = re.compile(r"\s*<tool_call>\s*(?P<name>[\w.:-]{1,128})\s*<tool_sep>")
    parameter_tag = Glm45Parser.parameter_tag
    value_ends = Glm45Parser.value_ends
    closers = (CLOSE, "</tool_calls>")
    layout = ToolCallFormat(
        open="<tool_calls>\n",
        call_start=f"{OPEN}NAME<tool_sep>\n",
        call_end=CLOSE,
        close="\n</tool_calls>",
        trigger="<tool_calls>",
        arguments=TaggedArguments("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    )


class K2HorizonParser(TaggedParser):
    """K2 Horizon: a parameter's type may stand between its name and its value."""

    name = "k2_horizon"
    template_marks: ClassVar[tuple[str, ...]] = ("<ifm|tool_call>",)
    openers = ("<ifm|tool_calls>", "<ifm|tool_call>")
    closers = ("</ifm|tool_call>", "</ifm|tool_calls>")
    value_ends = ("</ifm|arg_value>", "<ifm|arg_key>", "</ifm|tool_call>")
    markers = (
        *(*openers, *closers, "<ifm|arg_key>", "</ifm|arg_key>"),
        *("<ifm|arg_type>", "</ifm|arg_type>", "<ifm|arg_value>", "</ifm|arg_value>"),
    )
    function_mark = "<ifm|tool_call>"
    function_tag = re.compile(
        r"\s*<ifm\|tool_call>\s*(?P<name>[\w.:-]{1,128})\s*(?=<ifm\|arg_key>|</ifm\|tool_call>)"
    )
    parameter_tag = re.compile(
        r"\s*(?:<ifm\|arg_key>(?P<key>[^<\n]{1,128})</ifm\|arg_key>\s*"
        r"(?:<ifm\|arg_type>[^<\n]{0,64}</ifm\|arg_type>\s*)?<ifm\|arg_value>"
        r"|(?=</ifm\|tool_call>))"
    )
    layout = ToolCallFormat(
        open="<ifm|tool_calls>",
        call_start="<ifm|tool_call>NAME",
        call_end="</ifm|tool_call>",
        close="</ifm|tool_calls>",
        trigger="<ifm|tool_calls>",
        arguments=TaggedArguments(
            "<ifm|arg_key>KEY</ifm|arg_key><ifm|arg_value>", "</ifm|arg_value>"
        ),
    )


# -- Qwen 3 Coder's way: tags for the function and for each of its parameters.


class QwenCoderParser(TaggedParser):
    """A value whose closing tag is missing ends where the function's next parameter begins."""

    name = "qwen3_coder"
    template_marks: ClassVar[tuple[str, ...]] = ("<function=", "<parameter=")
    markers = (OPEN, CLOSE)
    openers = (OPEN, "<function=")
    function_mark = "<function="
    function_tag = re.compile(r"\s*<function=(?P<name>[^>\n]{1,128})>")
    parameter_tag = re.compile(
        r"\s*(?:<parameter=(?P<key>[^>\n]{1,128})>|</function>|(?=</tool_call>))"
    )
    value_ends = ("</parameter>", "</function>")
    unclosed = re.compile(r"\n<parameter=(?P<key>[^>\n]{1,128})>")
    unclosed_mark = "\n<parameter="
    closers = (CLOSE,)
    line_breaks = True
    layout = ToolCallFormat(
        call_start=f"{OPEN}\n<function=NAME>\n",
        call_end=f"</function>\n{CLOSE}",
        trigger=OPEN,
        arguments=TaggedArguments("<parameter=KEY>\n", "\n</parameter>\n"),
    )


class MimoParser(QwenCoderParser):
    """MiMo: the same without line breaks around values; what stands there is the value's."""

    name = "mimo"
    template_marks = ()
    line_breaks = False
    layout = ToolCallFormat(
        call_start=f"{OPEN}\n<function=NAME>\n",
        call_end=f"</function>\n{CLOSE}",
        trigger=OPEN,
        arguments=TaggedArguments("<parameter=KEY>", "</parameter>\n"),
    )


class SeedOssParser(QwenCoderParser):
    """Seed OSS: the same between tags of its own."""

    name = "seed_oss"
    template_marks = ("<seed:tool_call>",)
    openers = ("<seed:tool_call>", "<function=")
    closers = ("</seed:tool_call>",)
    markers = ("<seed:tool_call>", "</seed:tool_call>")
    parameter_tag = re.compile(
        r"\s*(?:<parameter=(?P<key>[^>\n]{1,128})>|</function>|(?=</seed:tool_call>))"
    )
    layout = ToolCallFormat(
        call_start="<seed:tool_call>\n<function=NAME>\n",
        call_end="</function>\n</seed:tool_call>",
        trigger="<seed:tool_call>",
        arguments=TaggedArguments("<parameter=KEY>\n", "\n</parameter>\n"),
    )
