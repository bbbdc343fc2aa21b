"""Kimi K2's way: each call has an id that holds its name, `functions.get_weather:0`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from inference.tools.function import ToolFunction
from inference.tools.layout import Layout, json_arguments, literal
from inference.tools.section import SectionParser

CALLS_BEGIN, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
_HEADER = re.compile(
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<>|]{1,128}):[0-9]{1,9})"
    rf"\s*{re.escape(ARGUMENTS)}\s*(?=[{{<])"
)


def _numbered(rule: str, function: ToolFunction, special: Mapping[str, int]) -> list[str]:
    """The call's number, then its arguments."""
    return [
        f"{rule}: /[0-9]{{1,2}}/ {literal(ARGUMENTS, special)} {rule}_json",
        *json_arguments(f"{rule}_json", function, special),
    ]


class KimiK2Parser(SectionParser):
    """The model's ids are kept: it finds the answers to its calls by them."""

    name = "kimi_k2"
    template_marks: ClassVar[tuple[str, ...]] = (CALLS_BEGIN,)
    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, ARGUMENTS)
    layout = Layout(
        open=CALLS_BEGIN,
        begin=f"{CALL_BEGIN}functions.NAME:",
        end=CALL_END,
        separator="",
        close=CALLS_END,
        trigger=CALLS_BEGIN,
        arguments=_numbered,
    )

    section = (CALLS_BEGIN, CALLS_END)
    call = (CALL_BEGIN, CALL_END)
    closing = (CALL_END,)
    header = _HEADER

    def __init__(self, functions: tuple[ToolFunction, ...] = ()) -> None:
        super().__init__(functions)
        self._ids: set[str] = set()

    def _begin(self, header: re.Match[str]) -> bool:
        known = header["id"] in self._ids
        self._ids.add(header["id"])
        self._call(header["name"], "" if known else header["id"])
        if self._held.startswith("<"):  # no arguments at all
            self._arguments("{}")
            return False
        return True
