"""PLaMo 3's way: a mark of its own around the name and around the arguments."""

from __future__ import annotations

import re
from typing import ClassVar

from inference.tools.layout import Layout
from inference.tools.section import SectionParser


def _mark(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"


CALLS_BEGIN, CALLS_END = _mark("begin_tool_requests"), _mark("end_tool_requests")
CALL_BEGIN, CALL_END = _mark("begin_tool_request"), _mark("end_tool_request")
NAME_BEGIN, NAME_END = _mark("begin_tool_name"), _mark("end_tool_name")
ARGUMENTS_BEGIN = f"{_mark('begin_tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>"
ARGUMENTS_END = _mark("end_tool_arguments")


class Plamo3Parser(SectionParser):
    """PLaMo 3."""

    name = "plamo3"
    template_marks: ClassVar[tuple[str, ...]] = (CALLS_BEGIN,)
    markers = (
        *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, NAME_BEGIN, NAME_END, ARGUMENTS_END),
        *(_mark("begin_tool_arguments"), "<|plamo:constrain|>", "<|plamo:msg|>"),
    )
    section = (CALLS_BEGIN, CALLS_END)
    call = (CALL_BEGIN, CALL_END)
    closing = (ARGUMENTS_END, CALL_END)
    header = re.compile(
        rf"\s*{re.escape(NAME_BEGIN)}\s*(?P<name>[^<\n]{{1,128}}?)\s*{re.escape(NAME_END)}"
        rf"\s*{re.escape(ARGUMENTS_BEGIN)}\s*(?={{)"
    )
    layout = Layout(
        open=CALLS_BEGIN,
        begin=f"{CALL_BEGIN}{NAME_BEGIN}NAME{NAME_END}{ARGUMENTS_BEGIN}",
        end=f"{ARGUMENTS_END}{CALL_END}",
        separator="",
        close=CALLS_END,
        trigger=CALLS_BEGIN,
    )

    def _begin(self, header: re.Match[str]) -> bool:
        self._call(header["name"])
        return True
