"""Families whose calls have a tag for each parameter, all based on `TaggedParser`."""

from __future__ import annotations

import re
from typing import ClassVar

from inference.parsers.tagged_tools import TaggedArguments, TaggedParser
from inference.parsers.tool_grammar import ToolCallFormat

# -- `<invoke name="...">`: MiniMax M2, DeepSeek V3.2 and later, Step 3.


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


# -- GLM's format and similar ones: the name, then each parameter's name and value in tags.


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Glm45Parser(TaggedParser):
    """GLM 4.5 and 4.6, one line per tag; GLM 4.7's form on a single line is parsed as well."""

    name = "glm45"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN, "<arg_key>")
    markers = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    openers = (OPEN,)
    function_tag = re.compile(r"\s*(?P<name>[\w.:-]{1,128})\s*(?=<arg_key>|</tool_call>)")
    parameter_tag = re.compile(
        r"\s*(?:<arg_key>(?P<key>[^<\n]{1,128})</arg_key>\s*<arg_value>|(?=</tool_call>))"
    )
    value_ends = ("</arg_value>", "<arg_key>", CLOSE)
    closers = (CLOSE,)
    layout = ToolCallFormat(
        call_start=f"{OPEN}NAME\n",
        call_end=CLOSE,
        trigger=OPEN,
        arguments=TaggedArguments("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    )


class Glm47Parser(Glm45Parser):
    """GLM 4.7, whose enforced calls have no line breaks."""

    name = "glm47"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN, "}<arg_key>")
    layout = ToolCallFormat(
        call_start=f"{OPEN}NAME",
        call_end=CLOSE,
        separator="",
        trigger=OPEN,
        arguments=TaggedArguments("<arg_key>KEY</arg_key><arg_value>", "</arg_value>"),
    )


class HyV3Parser(TaggedParser):
    """Hunyuan 3: a mark after the function's name, and tags around all calls."""

    name = "hy_v3"
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_sep>", "<arg_key>")
    openers = ("<tool_calls>", OPEN)
    markers = (*openers, "</tool_calls>", CLOSE, "<tool_sep>", *Glm45Parser.markers[2:])
    function_mark = OPEN
    function_tag = re.compile(r"\s*<tool_call>\s*(?P<name>[\w.:-]{1,128})\s*<tool_sep>")
    parameter_tag = Glm45Parser.parameter_tag
    value_ends = Glm45Parser.value_ends
    closers = (CLOSE, "</tool_calls>")
    layout = ToolCallFormat(
        open="<tool_calls>\n",
        call_start=f"{OPEN}NAME<tool_sep>\n",
        call_end=CLOSE,
        close="\n</tool_calls>",
        trigger="<tool_calls>",
        arguments=TaggedArguments("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    )


class K2HorizonParser(TaggedParser):
    """K2 Horizon: a parameter's type may follow its name."""

    name = "k2_horizon"
    template_marks: ClassVar[tuple[str, ...]] = ("<ifm|tool_call>",)
    openers = ("<ifm|tool_calls>", "<ifm|tool_call>")
    closers = ("</ifm|tool_call>", "</ifm|tool_calls>")
    value_ends = ("</ifm|arg_value>", "<ifm|arg_key>", "</ifm|tool_call>")
    markers = (
        *(*openers, *closers, "<ifm|arg_key>", "</ifm|arg_key>"),
        *("<ifm|arg_type>", "</ifm|arg_type>", "<ifm|arg_value>", "</ifm|arg_value>"),
    )
    function_mark = "<ifm|tool_call>"
    function_tag = re.compile(
        r"\s*<ifm\|tool_call>\s*(?P<name>[\w.:-]{1,128})\s*(?=<ifm\|arg_key>|</ifm\|tool_call>)"
    )
    parameter_tag = re.compile(
        r"\s*(?:<ifm\|arg_key>(?P<key>[^<\n]{1,128})</ifm\|arg_key>\s*"
        r"(?:<ifm\|arg_type>[^<\n]{0,64}</ifm\|arg_type>\s*)?<ifm\|arg_value>"
        r"|(?=</ifm\|tool_call>))"
    )
    layout = ToolCallFormat(
        open="<ifm|tool_calls>",
        call_start="<ifm|tool_call>NAME",
        call_end="</ifm|tool_call>",
        close="</ifm|tool_calls>",
        trigger="<ifm|tool_calls>",
        arguments=TaggedArguments(
            "<ifm|arg_key>KEY</ifm|arg_key><ifm|arg_value>", "</ifm|arg_value>"
        ),
    )


# -- Qwen 3 Coder's format: tags around the function and around each parameter.


class QwenCoderParser(TaggedParser):
    """A value whose closing tag is missing ends where the function's next parameter begins."""

    name = "qwen3_coder"
    template_marks: ClassVar[tuple[str, ...]] = ("<function=", "<parameter=")
    markers = (OPEN, CLOSE)
    openers = (OPEN, "<function=")
    function_mark = "<function="
    function_tag = re.compile(r"\s*<function=(?P<name>[^>\n]{1,128})>")
    parameter_tag = re.compile(
        r"\s*(?:<parameter=(?P<key>[^>\n]{1,128})>|</function>|(?=</tool_call>))"
    )
    value_ends = ("</parameter>", "</function>", "\n<parameter=")
    closers = (CLOSE,)
    line_breaks = True
    layout = ToolCallFormat(
        call_start=f"{OPEN}\n<function=NAME>\n",
        call_end=f"</function>\n{CLOSE}",
        trigger=OPEN,
        arguments=TaggedArguments("<parameter=KEY>\n", "\n</parameter>\n"),
    )


class MimoParser(QwenCoderParser):
    """MiMo: Qwen 3 Coder's format, but line breaks around a value are part of it."""

    name = "mimo"
    template_marks = ()
    line_breaks = False
    layout = ToolCallFormat(
        call_start=f"{OPEN}\n<function=NAME>\n",
        call_end=f"</function>\n{CLOSE}",
        trigger=OPEN,
        arguments=TaggedArguments("<parameter=KEY>", "</parameter>\n"),
    )


class SeedOssParser(QwenCoderParser):
    """Seed OSS: Qwen 3 Coder's format with Seed's outer tag."""

    name = "seed_oss"
    template_marks = ("<seed:tool_call>",)
    openers = ("<seed:tool_call>", "<function=")
    closers = ("</seed:tool_call>",)
    markers = ("<seed:tool_call>", "</seed:tool_call>")
    parameter_tag = re.compile(
        r"\s*(?:<parameter=(?P<key>[^>\n]{1,128})>|</function>|(?=</seed:tool_call>))"
    )
    layout = ToolCallFormat(
        call_start="<seed:tool_call>\n<function=NAME>\n",
        call_end="</function>\n</seed:tool_call>",
        trigger="<seed:tool_call>",
        arguments=TaggedArguments("<parameter=KEY>\n", "\n</parameter>\n"),
    )
