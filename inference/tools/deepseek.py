"""DeepSeek V3's and V3.1's ways, with their own brackets around everything."""

from __future__ import annotations

import re
from typing import ClassVar

from inference.tools.layout import Layout
from inference.tools.section import SectionParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR, FENCE = "<｜tool▁sep｜>", "```"
_HEADER = re.compile(
    rf"\s*(?:function{SEPARATOR}(?P<fenced>[^\n<]+)\n{FENCE}json\s*"
    rf"|(?P<bare>[^\n<]+){SEPARATOR}\s*)(?={{)"
)


class DeepSeekV3Parser(SectionParser):
    """The name on a line, the arguments in a fenced block; V3.1's shorter form is read as well."""

    name = "deepseek_v3"
    template_marks: ClassVar[tuple[str, ...]] = (CALL_BEGIN, f"{FENCE}json")
    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
    layout = Layout(
        open=CALLS_BEGIN,
        begin=f"{CALL_BEGIN}function{SEPARATOR}NAME\n{FENCE}json\n",
        end=f"\n{FENCE}{CALL_END}",
        separator="\n",
        close=CALLS_END,
        trigger=CALLS_BEGIN,
    )

    section = (CALLS_BEGIN, CALLS_END)
    call = (CALL_BEGIN, CALL_END)
    closing = (FENCE, CALL_END)
    header = _HEADER

    def _begin(self, header: re.Match[str]) -> bool:
        self._call((header["fenced"] or header["bare"]).strip())
        return True


class DeepSeekV31Parser(DeepSeekV3Parser):
    """The same for models that write V3.1's form, when calls are enforced."""

    name = "deepseek_v31"
    template_marks: ClassVar[tuple[str, ...]] = (CALL_BEGIN,)
    layout = Layout(
        open=CALLS_BEGIN,
        begin=f"{CALL_BEGIN}NAME{SEPARATOR}",
        end=CALL_END,
        separator="",
        close=CALLS_END,
        trigger=CALLS_BEGIN,
    )
