"""Formats with `<invoke name="...">` tags: MiniMax M2, DeepSeek V3.2 and later, Step 3."""

from __future__ import annotations

import re
from typing import ClassVar

from inference.parsers.tagged_tools import TaggedArguments, TaggedParser
from inference.parsers.tool_grammar import ToolCallFormat

_NAME = r'(?P<name>[^"<>\n]{1,128})'
_KEY = r'(?P<key>[^"<>\n]{1,128})'


class MiniMaxM2Parser(TaggedParser):
    """MiniMax M2: `<minimax:tool_call>` around one or more `<invoke name="...">`."""

    name = "minimax_m2"
    template_marks: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>",)
    openers = ("<minimax:tool_call>",)
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")
    function_mark = "<invoke name="
    function_tag = re.compile(rf'\s*<invoke name="{_NAME}">')
    parameter_tag = re.compile(
        rf'\s*(?:<parameter name="{_KEY}">|</invoke>|(?=</minimax:tool_call>))'
    )
    value_ends = ("</parameter>", "</invoke>")
    closers = ("</minimax:tool_call>",)
    layout = ToolCallFormat(
        open="<minimax:tool_call>\n",
        call_start='<invoke name="NAME">\n',
        call_end="</invoke>",
        close="\n</minimax:tool_call>",
        trigger="<minimax:tool_call>",
        arguments=TaggedArguments('<parameter name="KEY">', "</parameter>\n"),
    )


_DSML = "｜DSML｜"


def _dsml_parameter(calls: str, space: str = "") -> re.Pattern[str]:
    """Return the pattern of a parameter's tag or the function's end. `calls`: the outer tag."""
    return re.compile(
        rf'\s*(?:<{_DSML}{space}parameter name="{_KEY}"(?: string="(?P<text>true|false)")?>'
        rf"|</{_DSML}{space}invoke>|(?=</{_DSML}{space}{calls}>))"
    )


def _dsml_layout(calls: str, space: str = "") -> ToolCallFormat:
    mark = f"{_DSML}{space}"
    return ToolCallFormat(
        open=f"<{mark}{calls}>\n",
        call_start=f'<{mark}invoke name="NAME">\n',
        call_end=f"</{mark}invoke>",
        close=f"\n</{mark}{calls}>",
        trigger=f"<{mark}{calls}>",
        arguments=TaggedArguments(
            f'<{mark}parameter name="KEY" string="TEXT">', f"</{mark}parameter>\n"
        ),
    )


class DeepSeekV32Parser(TaggedParser):
    """DeepSeek V3.2: `<invoke>` tags with a prefix; `string` says whether a value is a string."""

    name = "deepseek_v32"
    template_marks: ClassVar[tuple[str, ...]] = (f"<{_DSML}",)
    openers: ClassVar[tuple[str, ...]] = (f"<{_DSML}function_calls>",)
    markers = (_DSML,)
    function_mark = f"<{_DSML}invoke name="
    function_tag = re.compile(rf'\s*<{_DSML}invoke name="{_NAME}">')
    parameter_tag = _dsml_parameter("function_calls")
    value_ends = (f"</{_DSML}parameter>", f"</{_DSML}invoke>")
    closers: ClassVar[tuple[str, ...]] = (f"</{_DSML}function_calls>",)
    layout = _dsml_layout("function_calls")


class DeepSeekV4Parser(DeepSeekV32Parser):
    """DeepSeek V4: a different outer tag, which the model sometimes truncates."""

    name = "deepseek_v4"
    template_marks = (f"<{_DSML}tool_calls>",)
    openers = (f"<{_DSML}tool_calls>", f"<{_DSML}toolcalls>", f"<{_DSML}tool>")
    parameter_tag = _dsml_parameter("tool_calls")
    closers = (f"</{_DSML}tool_calls>",)
    layout = _dsml_layout("tool_calls")


class DeepSeekV41Parser(DeepSeekV32Parser):
    """DeepSeek V4.1: a space between the prefix and each tag's name."""

    name = "deepseek_v41"
    template_marks = (f"<{_DSML} calls>",)
    openers = (f"<{_DSML} calls>",)
    function_mark = f"<{_DSML} invoke name="
    function_tag = re.compile(rf'\s*<{_DSML} invoke name="{_NAME}">')
    parameter_tag = _dsml_parameter("calls", " ")
    value_ends = (f"</{_DSML} parameter>", f"</{_DSML} invoke>")
    closers = (f"</{_DSML} calls>",)
    layout = _dsml_layout("calls", " ")


class Step3Parser(TaggedParser):
    """Step 3: a pair of marks around each call, and another pair around all calls."""

    name = "step3"
    template_marks: ClassVar[tuple[str, ...]] = ("<steptml:invoke",)
    openers = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>")
    markers = (
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_call_end｜>",
        "<｜tool_sep｜>",
    )
    function_mark = "<steptml:invoke name="
    function_tag = re.compile(
        r"\s*(?:<｜tool_call_begin｜>\s*)?(?:function\s*<｜tool_sep｜>\s*)?"
        rf'<steptml:invoke name="{_NAME}">'
    )
    parameter_tag = re.compile(
        rf'\s*(?:<steptml:parameter name="{_KEY}">|</steptml:invoke>|(?=<｜tool_call_end｜>))'
    )
    value_ends = ("</steptml:parameter>", "</steptml:invoke>")
    closers = ("<｜tool_call_end｜>", "<｜tool_sep｜>", "<｜tool_calls_end｜>")
    layout = ToolCallFormat(
        open="<｜tool_calls_begin｜>",
        call_start='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
        call_end="</steptml:invoke><｜tool_call_end｜>",
        separator="\n",
        close="<｜tool_calls_end｜>",
        trigger="<｜tool_calls_begin｜>",
        arguments=TaggedArguments('<steptml:parameter name="KEY">', "</steptml:parameter>"),
    )
