"""Hermes's way, which Qwen 2.5 and our demo model share: `<tool_call>` JSON `</tool_call>`."""

from __future__ import annotations

from typing import ClassVar

from inference.tools.base import ToolParser
from inference.tools.layout import Layout

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """A closing tag that is missing is forgiven.

    Attributes:
        opens: each begins a call. close: what may end it, "" for nothing.
    """

    name = "hermes"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN,)
    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    opens: ClassVar[tuple[str, ...]] = (OPEN,)
    close: ClassVar[str] = CLOSE
    _opening = OPEN
    layout = Layout(
        begin=f'{OPEN}\n{{"name": "NAME", "arguments": ', end=f"}}\n{CLOSE}", trigger=OPEN
    )

    def _text(self) -> bool:
        self._opening = self._find(*self.opens)
        return bool(self._opening) and self._then(self._call_object)

    def _call_object(self) -> bool:
        return self._in_object(self._opening, self._close)

    def _close(self) -> bool:
        if self.close and self._skip(self.close) is None:
            return False
        return self._then(self._text)


class Ernie45Parser(HermesParser):
    """ERNIE 4.5: the same, and its text stands between `<response>` tags, which are left out."""

    name = "ernie45"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN, "<response>")
    markers = (OPEN, CLOSE, "<response>", "</response>")

    def _text(self) -> bool:
        found = self._find(OPEN, "<response>", "</response>")
        if found == OPEN:
            self._opening = OPEN
            return self._then(self._call_object)
        self._after_call = self._after_call or bool(found)  # white space next to a tag is none
        return bool(found)


class LongcatParser(HermesParser):
    """LongCat: the same between tags of its own."""

    name = "longcat"
    template_marks = ("<longcat_tool_call>",)
    opens = ("<longcat_tool_call>",)
    close = "</longcat_tool_call>"
    markers = (*opens, close)
    layout = Layout(
        begin='<longcat_tool_call>\n{"name": "NAME", "arguments": ',
        end="}\n</longcat_tool_call>",
        trigger="<longcat_tool_call>",
    )


class Granite20bParser(HermesParser):
    """Granite 20B function calling: `<function_call> {...}`, without an end."""

    name = "granite-20b-fc"
    template_marks = ()
    opens = markers = ("<function_call>",)
    close = ""
    layout = Layout(
        begin='<function_call> {"name": "NAME", "arguments": ', end="}", trigger="<function_call>"
    )


class GigaChat3Parser(HermesParser):
    """GigaChat 3: a message of the role `function call`, or one mark, then the object."""

    name = "gigachat3"
    template_marks = ("<|role_sep|>", "function call")
    close = "<|message_sep|>"
    opens = (
        "<|function_call|>",
        f"{close}\n\nfunction call<|role_sep|>\n",
        "function call<|role_sep|>\n",
    )
    markers = ("<|function_call|>", "<|role_sep|>", close)
    layout = Layout(
        begin='<|function_call|>{"name": "NAME", "arguments": ',
        end="}",
        separator="",
        trigger="<|function_call|>",
    )
