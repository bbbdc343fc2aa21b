"""Hermes's way, which Qwen 2.5 and our demo model share: `<tool_call>` JSON `</tool_call>`."""

from __future__ import annotations

from typing import ClassVar

from inference.tools.base import ToolParser
from inference.tools.layout import Layout

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """A closing tag that is missing is forgiven."""

    name = "hermes"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN,)
    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    layout = Layout(
        begin=f'{OPEN}\n{{"name": "NAME", "arguments": ', end=f"}}\n{CLOSE}", trigger=OPEN
    )

    def _text(self) -> bool:
        if self._find(OPEN):
            self._state = self._call_object
            return True
        return False

    def _call_object(self) -> bool:
        return self._in_object(OPEN, self._close)

    def _close(self) -> bool:
        if self._skip(CLOSE) is None:
            return False
        self._state = self._text
        return True


class Ernie45Parser(HermesParser):
    """ERNIE 4.5: the same, and its text stands between `<response>` tags, which are left out."""

    name = "ernie45"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN, "<response>")
    markers = (OPEN, CLOSE, "<response>", "</response>")

    def _text(self) -> bool:
        found = self._find(OPEN, "<response>", "</response>")
        if found == OPEN:
            return self._then(self._call_object)
        self._after_call = self._after_call or bool(found)  # white space next to a tag is none
        return bool(found)
