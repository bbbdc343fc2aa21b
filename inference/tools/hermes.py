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
    markers = (OPEN, CLOSE)
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
