"""Parsers for calls that are JSON objects, alone or in a list."""

from __future__ import annotations

import re
from typing import ClassVar

from inference.parsers.state_machine import is_prefix
from inference.parsers.tool_grammar import ToolCallFormat
from inference.parsers.tool_parser import FENCE, MAX_HEADER, ToolCallParser

#: Beginning of an object whose only field is the list, with and without white space.
_WRAPPER_START = '{"tool_calls":['
_WRAPPER = re.compile(r'\{\s*"tool_calls"\s*:\s*(?=\[)')
#: Openings of lists that are themselves part of the JSON.
_JSON = (
    "[",
    '{"tool_calls":',
    '{ "tool_calls":',
    *(f'{{\n{indent}"tool_calls":' for indent in ("", "  ", "    ")),
)
#: A code fence before the list, or the language after a fence that was already consumed.
_FENCE_START = re.compile(r"\s*(```)?[a-z_]*\s*")


def json_list(mark: str, close: str = "") -> ToolCallFormat:
    """Return the format of a list of call objects after `mark` and before `close`."""
    return ToolCallFormat(
        open=f"{mark}[",
        call_start='{"name": "NAME", "arguments": ',
        call_end="}",
        separator=", ",
        close=f"]{close}",
        trigger=mark,
    )


def hermes_format(mark: str, close: str) -> ToolCallFormat:
    """Return the format of a call object between two lines, `mark` and `close`."""
    start = f'{mark}\n{{"name": "NAME", "arguments": '
    return ToolCallFormat(call_start=start, call_end=f"}}\n{close}", trigger=mark)


class ObjectListParser(ToolCallParser):
    """Parses JSON call objects after an opening text: one, several, or a list of them.

    They may be in a code fence, or in the field `tool_calls` of an object.

    Attributes:
        openers: texts that open the calls. closers: texts that may follow them.
    """

    openers: ClassVar[tuple[str, ...]]

    #: Whether the list has contained a call.
    _began = False
    #: Brackets of open lists.
    _depth = 0
    #: Whether the list is an object's field.
    _is_wrapped = False

    def _text(self) -> bool:
        self._opening = self._find_marker(*self.openers)
        return bool(self._opening) and self._begin_list()

    def _begin_list(self) -> bool:
        self._began, self._depth, self._is_wrapped = False, 0, False
        return self._goto(self._list_start)

    def _list_start(self) -> bool:
        """Expect the list's bracket, or an object without a list."""
        repeated = self._skip_repeated([opener for opener in self.openers if opener not in _JSON])
        if repeated is not False:
            return bool(repeated)
        fence = _FENCE_START.match(self._buffer)
        if fence is not None and (fence[1] or self._opening.endswith(FENCE)):
            if fence.end() == len(self._buffer) and not self._is_finished:
                return False
            if fence.end():
                self._consume_opening(fence.end())
                return True
        rest = self._buffer.lstrip()
        if not self._is_finished and FENCE.startswith(rest):
            return False
        if rest.startswith("{"):
            return self._object_start(rest)
        if not rest.startswith("["):
            return self._parse_without_list()
        return self._goto(self._item)

    def _object_start(self, rest: str) -> bool:
        """Parse an object instead of a list: a call, or the object that contains the list."""
        wrapper = _WRAPPER.match(rest, 0, MAX_HEADER)
        if wrapper is None:
            may_wrap = len(rest) < MAX_HEADER and _WRAPPER_START.startswith("".join(rest.split()))
            if may_wrap and not self._is_finished:
                return False
            return self._goto(self._call_object)
        self._consume_opening(len(self._buffer) - len(rest) + wrapper.end())
        self._is_wrapped = True
        return True

    def _parse_without_list(self) -> bool:
        return self._fail(self._opening)

    def _consume_opening(self, size: int) -> None:
        """Add characters to the opening, which becomes content if no call follows."""
        self._opening += self._buffer[:size]
        self._buffer = self._buffer[size:]

    def _item(self) -> bool:
        """Consume text before an object of the list, or at the list's end.

        Models also write an extra brace, semicolons, and a comma after the last object.
        """
        rest = self._buffer.lstrip(", ;\t\r\n" + "}" * self._began)
        if not rest and not self._is_finished:
            return False
        if rest.startswith("{"):
            self._consume_opening(len(self._buffer) - len(rest))
            return self._goto(self._call_object)
        if rest.startswith("[") and (self._depth or not self._began):
            inner = rest[1:].lstrip()
            if not inner and not self._is_finished:
                return False
            if not self._began or inner.startswith("{"):
                self._depth += 1
                self._consume_opening(len(self._buffer) - len(rest) + 1)
                return True
        if not self._began:
            return self._fail(self._opening)
        if rest.startswith("]"):
            self._buffer, self._depth = rest[1:], self._depth - 1
            if self._depth > 0:
                return True
        elif is_prefix(rest, self.closers) and not self._is_finished:
            return False
        elif not rest or rest.startswith(self.closers) or is_prefix(rest, self.closers):
            self._buffer = rest
        return self._goto(self._after_list)

    def _call_object(self) -> bool:
        previous_num_calls = self._num_calls
        going = self._parse_object("" if self._began else self._opening, self._item)
        self._began = self._began or self._num_calls > previous_num_calls
        return going

    def _after_list(self) -> bool:
        """Consume the model's closing texts."""
        if self._is_wrapped:
            has_brace = self._skip_text("}")
            if has_brace is None:
                return False
            self._is_wrapped = False
        for mark in (FENCE, *self.closers) if FENCE in self._opening else self.closers:
            has_mark = self._skip_text(mark)
            if has_mark is None:
                return False
            if has_mark and mark == FENCE:
                self._opening = self._opening.replace(FENCE, "")
                return self._goto(self._next_fence)
            if has_mark:
                if not self._opening.startswith(FENCE):
                    self._opening = self._opening.replace(FENCE, "")
                return True
        return self._goto(self._text)

    def _next_fence(self) -> bool:
        """Consume another code fence, around another call, or a closing text."""
        has_fence = self._skip_text(FENCE)
        if has_fence is None:
            return False
        if not has_fence:
            return self._goto(self._after_list)
        self._opening, self._gap = FENCE, ""
        return self._begin_list()


# -- Hermes's format, which Qwen 2.5 and the demo model use: `<tool_call>` JSON `</tool_call>`.


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ObjectListParser):
    """Hermes: the closing tag may be missing."""

    name = "hermes"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN,)
    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    openers: ClassVar[tuple[str, ...]] = (OPEN,)
    closers: ClassVar[tuple[str, ...]] = (CLOSE,)
    layout = hermes_format(OPEN, CLOSE)


class Ernie45Parser(HermesParser):
    """ERNIE 4.5: Hermes's format; `<response>` tags around the text are removed."""

    name = "ernie45"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN, "<response>")
    markers = (OPEN, CLOSE, "<response>", "</response>")

    def _text(self) -> bool:
        marker = self._find_marker(OPEN, "<response>", "</response>")
        if marker == OPEN:
            self._opening = OPEN
            return self._begin_list()
        self._after_call = self._after_call or bool(marker)  # drop white space next to a tag
        return bool(marker)


class LongcatParser(HermesParser):
    """LongCat: Hermes's format with LongCat's tags."""

    name = "longcat"
    template_marks = ("<longcat_tool_call>",)
    openers = ("<longcat_tool_call>",)
    closers = ("</longcat_tool_call>",)
    markers = openers + closers
    layout = hermes_format(*openers, *closers)


class Granite20bParser(HermesParser):
    """Granite 20B function calling: `<function_call> {...}`, without a closing tag."""

    name = "granite-20b-fc"
    template_marks = ()
    openers = markers = ("<function_call>",)
    closers = ()
    layout = ToolCallFormat(
        call_start='<function_call> {"name": "NAME", "arguments": ',
        call_end="}",
        trigger="<function_call>",
    )


class GigaChat3Parser(HermesParser):
    """GigaChat 3: the object follows a `function call` role header or a single mark."""

    name = "gigachat3"
    template_marks = ("<|role_sep|>", "function call")
    closers = ("<|message_sep|>",)
    openers = (
        "<|function_call|>",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        "function call<|role_sep|>\n",
    )
    markers = ("<|function_call|>", "<|role_sep|>", "<|message_sep|>")
    layout = ToolCallFormat(
        call_start='<|function_call|>{"name": "NAME", "arguments": ',
        call_end="}",
        separator="",
        trigger="<|function_call|>",
    )


class GraniteParser(ObjectListParser):
    """Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]`."""

    name = "granite"
    template_marks: ClassVar[tuple[str, ...]] = ("<|tool_call|>",)
    openers = ("<|tool_call|>", "<tool_call>")
    markers = openers
    layout = json_list("<|tool_call|>")


class JsonParser(ObjectListParser):
    """Any model: the whole answer is `[{"name": ..., "arguments": {...}}]` or one such object."""

    name = "json"
    openers = ()
    layout = json_list("")

    def _text(self) -> bool:
        if self._num_calls:
            return self._plain_text()
        rest = self._buffer.lstrip()
        if not rest and not self._is_finished:
            return False
        if rest.startswith(("[", "{")):
            self._gap = self._buffer[: len(self._buffer) - len(rest)]
            self._buffer = rest
            return self._begin_list()
        return self._goto(self._plain_text)

    def _after_failure(self) -> bool:
        self._state = self._plain_text
        return True


# -- Models that write their calls as a list of JSON objects between model-specific marks.


class HunyuanA13BParser(ObjectListParser):
    """Hunyuan A13B: `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`."""

    name = "hunyuan_a13b"
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_calls>", "<answer>")
    openers = ("<tool_calls>",)
    closers = ("</tool_calls>",)
    markers = openers + closers
    layout = json_list("<tool_calls>", "</tool_calls>")


class JambaParser(HunyuanA13BParser):
    """Jamba: `<tool_calls>` around a list with one object per line."""

    name = "jamba"
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_calls>",)
    layout = ToolCallFormat(
        open="<tool_calls>[\n    ",
        call_start='{"name": "NAME", "arguments": ',
        call_end="}",
        separator=",\n    ",
        close="\n]</tool_calls>",
        trigger="<tool_calls>",
    )


class Phi4MiniJsonParser(ObjectListParser):
    """Phi 4 mini: `functools[{"name": ..., "arguments": {...}}]`."""

    name = "phi4_mini_json"
    template_marks: ClassVar[tuple[str, ...]] = ("functools",)
    openers = ("functools",)
    layout = json_list("functools")


class InternLMParser(ObjectListParser):
    """InternLM 2: `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`."""

    name = "internlm"
    template_marks: ClassVar[tuple[str, ...]] = ("<|plugin|>",)
    openers = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    closers = ("<|action_end|>",)
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    layout = ToolCallFormat(
        call_start='<|action_start|><|plugin|>{"name": "NAME", "parameters": ',
        call_end="}<|action_end|>",
        separator="\n",
        trigger="<|action_start|><|plugin|>",
    )


class XlamParser(ObjectListParser):
    """xLAM: a bare list, or one in a code fence or after a mark, with or without text before it."""

    name = "xlam"
    openers = ("[TOOL_CALLS]", "<tool_call>", *_JSON, FENCE)
    closers = ("</tool_call>",)
    markers = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>")
    layout = json_list("")

    def _text(self) -> bool:
        has_more = super()._text()
        if self._opening in _JSON:
            self._buffer, self._opening = self._opening + self._buffer, ""
        return has_more
