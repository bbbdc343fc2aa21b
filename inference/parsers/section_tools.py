"""Formats with calls between marks in a marked section: DeepSeek V3, Kimi K2 and PLaMo 3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from inference.parsers.tool_grammar import (
    ToolCallFormat,
    ToolFunction,
    json_arguments,
    lark_literal,
)
from inference.parsers.tool_parser import SectionParser

# -- DeepSeek V3 and V3.1.


CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR, FENCE = "<｜tool▁sep｜>", "```"
_HEADER = re.compile(
    rf"\s*(?:function{SEPARATOR}(?P<fenced>[^\n<]+)\n{FENCE}json\s*"
    rf"|(?P<bare>[^\n<]+){SEPARATOR}\s*)(?={{)"
)


class DeepSeekV3Parser(SectionParser):
    """DeepSeek V3: arguments in a fenced block; V3.1's shorter form is parsed as well."""

    name = "deepseek_v3"
    template_marks: ClassVar[tuple[str, ...]] = (CALL_BEGIN, f"{FENCE}json")
    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
    layout = ToolCallFormat(
        open=CALLS_BEGIN,
        call_start=f"{CALL_BEGIN}function{SEPARATOR}NAME\n{FENCE}json\n",
        call_end=f"\n{FENCE}{CALL_END}",
        separator="\n",
        close=CALLS_END,
        trigger=CALLS_BEGIN,
    )

    section = (CALLS_BEGIN, CALLS_END)
    call = (CALL_BEGIN, CALL_END)
    closers = (CALL_END, CALLS_END)
    closing = (FENCE, CALL_END)
    header = _HEADER

    def _begin(self, header: re.Match[str]) -> bool:
        self._call((header["fenced"] or header["bare"]).strip())
        return True


class DeepSeekV31Parser(DeepSeekV3Parser):
    """DeepSeek V3.1, whose enforced calls have its shorter form."""

    name = "deepseek_v31"
    template_marks: ClassVar[tuple[str, ...]] = (CALL_BEGIN,)
    layout = ToolCallFormat(
        open=CALLS_BEGIN,
        call_start=f"{CALL_BEGIN}NAME{SEPARATOR}",
        call_end=CALL_END,
        separator="",
        close=CALLS_END,
        trigger=CALLS_BEGIN,
    )


KIMI_CALLS_BEGIN, KIMI_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL_BEGIN, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_HEADER = re.compile(
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<>|]{1,128})(?P<number>:[0-9]{1,9})?)"
    rf"\s*{re.escape(ARGUMENTS)}\s*(?=[{{<])"
)


def _numbered(rule: str, function: ToolFunction, special: Mapping[str, int]) -> list[str]:
    """Return rules for the number, which ends an id such as `functions.get_weather:0`, and JSON."""
    return [
        f"{rule}: /[0-9]{{1,2}}/ {lark_literal(ARGUMENTS, special)} {rule}_json",
        *json_arguments(f"{rule}_json", function, special),
    ]


class KimiK2Parser(SectionParser):
    """Kimi K2. Calls keep the model's ids, by which it matches results to calls."""

    name = "kimi_k2"
    template_marks: ClassVar[tuple[str, ...]] = (KIMI_CALLS_BEGIN,)
    markers = (KIMI_CALLS_BEGIN, KIMI_CALLS_END, KIMI_CALL_BEGIN, KIMI_CALL_END, ARGUMENTS)
    layout = ToolCallFormat(
        open=KIMI_CALLS_BEGIN,
        call_start=f"{KIMI_CALL_BEGIN}functions.NAME:",
        call_end=KIMI_CALL_END,
        separator="",
        close=KIMI_CALLS_END,
        trigger=KIMI_CALLS_BEGIN,
        arguments=_numbered,
    )

    section = (KIMI_CALLS_BEGIN, KIMI_CALLS_END)
    call = (KIMI_CALL_BEGIN, KIMI_CALL_END)
    closers = (KIMI_CALL_END, KIMI_CALLS_END)
    closing = (KIMI_CALL_END,)
    header = _KIMI_HEADER

    def __init__(self, functions: tuple[ToolFunction, ...] = ()) -> None:
        super().__init__(functions)
        self._ids: set[str] = set()

    def _begin(self, header: re.Match[str]) -> bool:
        is_new = header["number"] is not None and header["id"] not in self._ids
        self._ids.add(header["id"])
        self._call(header["name"], header["id"] if is_new else "")
        if self._buffer.startswith("<"):  # no arguments
            self._arguments("{}")
            return False
        return True


# -- PLaMo 3: marks around the name and around the arguments.


def _mark(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"


PLAMO_CALLS_BEGIN, PLAMO_CALLS_END = _mark("begin_tool_requests"), _mark("end_tool_requests")
PLAMO_CALL_BEGIN, PLAMO_CALL_END = _mark("begin_tool_request"), _mark("end_tool_request")
NAME_BEGIN, NAME_END = _mark("begin_tool_name"), _mark("end_tool_name")
ARGUMENTS_BEGIN = f"{_mark('begin_tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>"
ARGUMENTS_END = _mark("end_tool_arguments")


class Plamo3Parser(SectionParser):
    """PLaMo 3."""

    name = "plamo3"
    template_marks: ClassVar[tuple[str, ...]] = (PLAMO_CALLS_BEGIN,)
    markers = (
        *(
            PLAMO_CALLS_BEGIN,
            PLAMO_CALLS_END,
            PLAMO_CALL_BEGIN,
            PLAMO_CALL_END,
            NAME_BEGIN,
            NAME_END,
            ARGUMENTS_END,
        ),
        *(_mark("begin_tool_arguments"), "<|plamo:constrain|>", "<|plamo:msg|>"),
    )
    section = (PLAMO_CALLS_BEGIN, PLAMO_CALLS_END)
    call = (PLAMO_CALL_BEGIN, PLAMO_CALL_END)
    closers = (PLAMO_CALL_END, PLAMO_CALLS_END)
    closing = (ARGUMENTS_END, PLAMO_CALL_END)
    header = re.compile(
        rf"\s*{re.escape(NAME_BEGIN)}\s*(?P<name>[^<\n]{{1,128}}?)\s*{re.escape(NAME_END)}"
        rf"\s*{re.escape(ARGUMENTS_BEGIN)}\s*(?={{)"
    )
    layout = ToolCallFormat(
        open=PLAMO_CALLS_BEGIN,
        call_start=f"{PLAMO_CALL_BEGIN}{NAME_BEGIN}NAME{NAME_END}{ARGUMENTS_BEGIN}",
        call_end=f"{ARGUMENTS_END}{PLAMO_CALL_END}",
        separator="",
        close=PLAMO_CALLS_END,
        trigger=PLAMO_CALLS_BEGIN,
    )

    def _begin(self, header: re.Match[str]) -> bool:
        self._call(header["name"])
        return True
