"""GLM's ways, and others': a name, then pairs of tags for each parameter's name and value."""

from __future__ import annotations

import re
from typing import ClassVar

from inference.tools.layout import Layout
from inference.tools.tagged import TaggedArguments, TaggedParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Glm45Parser(TaggedParser):
    """GLM 4.5 and 4.6, a line for each part; 4.7's form without lines is read as well."""

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
    layout = Layout(
        begin=f"{OPEN}NAME\n",
        end=CLOSE,
        trigger=OPEN,
        arguments=TaggedArguments("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    )


class Glm47Parser(Glm45Parser):
    """The same for models that write no line breaks, when calls are enforced."""

    name = "glm47"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN, "}<arg_key>")
    layout = Layout(
        begin=f"{OPEN}NAME",
        end=CLOSE,
        separator="",
        trigger=OPEN,
        arguments=TaggedArguments("<arg_key>KEY</arg_key><arg_value>", "</arg_value>"),
    )


class HyV3Parser(TaggedParser):
    """Hunyuan 3: a mark behind the name, and all calls between tags."""

    name = "hy_v3"
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_sep>", "<arg_key>")
    openers = ("<tool_calls>", OPEN)
    markers = (*openers, "</tool_calls>", CLOSE, "<tool_sep>", *Glm45Parser.markers[2:])
    function_mark = OPEN
    function_tag = re.compile(r"\s*<tool_call>\s*(?P<name>[\w.:-]{1,128})\s*<tool_sep>")
    parameter_tag = Glm45Parser.parameter_tag
    value_ends = Glm45Parser.value_ends
    closers = (CLOSE, "</tool_calls>")
    layout = Layout(
        open="<tool_calls>\n",
        begin=f"{OPEN}NAME<tool_sep>\n",
        end=CLOSE,
        close="\n</tool_calls>",
        trigger="<tool_calls>",
        arguments=TaggedArguments("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    )


class K2HorizonParser(TaggedParser):
    """K2 Horizon: a parameter's type may stand between its name and its value."""

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
    layout = Layout(
        open="<ifm|tool_calls>",
        begin="<ifm|tool_call>NAME",
        end="</ifm|tool_call>",
        close="</ifm|tool_calls>",
        trigger="<ifm|tool_calls>",
        arguments=TaggedArguments(
            "<ifm|arg_key>KEY</ifm|arg_key><ifm|arg_value>", "</ifm|arg_value>"
        ),
    )
