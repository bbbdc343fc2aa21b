"""DeepSeek V3's and V3.1's ways, with their own brackets around everything."""

from __future__ import annotations

import re
from typing import ClassVar

from inference.tools.base import ToolParser
from inference.tools.layout import Layout

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR, FENCE = "<｜tool▁sep｜>", "```"
_HEADER = re.compile(
    rf"\s*(?:function{SEPARATOR}(?P<fenced>[^\n<]+)\n{FENCE}json\s*"
    rf"|(?P<bare>[^\n<]+){SEPARATOR}\s*)(?={{)"
)


class DeepSeekV3Parser(ToolParser):
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

    _opening = ""

    def _text(self) -> bool:
        self._opening = self._find(CALLS_BEGIN, CALL_BEGIN)
        if self._opening:
            self._state = self._before_call if self._opening == CALLS_BEGIN else self._name
        return bool(self._opening)

    def _before_call(self) -> bool:
        found = self._skip(CALL_BEGIN)
        if found is None:
            return False
        if not found:
            return self._fail(self._opening)
        self._opening += CALL_BEGIN
        self._state = self._name
        return True

    def _name(self) -> bool:
        header = self._header(_HEADER)
        if header is None:
            return False
        if header is False:
            return self._fail(self._opening)
        self._call((header["fenced"] or header["bare"]).strip())
        self._state = self._call_arguments
        return True

    def _call_arguments(self) -> bool:
        return self._in_value(self._after_arguments)

    def _after_arguments(self) -> bool:
        """Closing marks, in their order but each optional; perhaps another call."""
        for mark, state in (
            (FENCE, self._after_arguments),
            (CALL_END, self._after_arguments),
            (CALL_BEGIN, self._name),
            (CALLS_END, self._text),
        ):
            found = self._skip(mark)
            if found is None:
                return False
            if found:
                self._opening, self._state = mark, state
                return True
        self._state = self._text
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
