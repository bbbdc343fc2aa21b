"""GLM's ways: a name, then pairs of tags for each parameter's name and value."""

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
