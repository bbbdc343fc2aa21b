"""Qwen 3 Coder's way: tags for the function and for each of its parameters."""

from __future__ import annotations

import re
from typing import ClassVar

from inference.tools.layout import Layout
from inference.tools.tagged import TaggedArguments, TaggedParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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
    value_ends = ("</parameter>", "</function>")
    unclosed = re.compile(r"\n<parameter=(?P<key>[^>\n]{1,128})>")
    unclosed_mark = "\n<parameter="
    closers = (CLOSE,)
    line_breaks = True
    layout = Layout(
        begin=f"{OPEN}\n<function=NAME>\n",
        end=f"</function>\n{CLOSE}",
        trigger=OPEN,
        arguments=TaggedArguments("<parameter=KEY>\n", "\n</parameter>\n"),
    )


class MimoParser(QwenCoderParser):
    """MiMo: the same without line breaks around values; what stands there is the value's."""

    name = "mimo"
    template_marks = ()
    line_breaks = False
    layout = Layout(
        begin=f"{OPEN}\n<function=NAME>\n",
        end=f"</function>\n{CLOSE}",
        trigger=OPEN,
        arguments=TaggedArguments("<parameter=KEY>", "</parameter>\n"),
    )


class SeedOssParser(QwenCoderParser):
    """Seed OSS: the same between tags of its own."""

    name = "seed_oss"
    template_marks = ("<seed:tool_call>",)
    openers = ("<seed:tool_call>", "<function=")
    closers = ("</seed:tool_call>",)
    markers = ("<seed:tool_call>", "</seed:tool_call>")
    parameter_tag = re.compile(
        r"\s*(?:<parameter=(?P<key>[^>\n]{1,128})>|</function>|(?=</seed:tool_call>))"
    )
    layout = Layout(
        begin="<seed:tool_call>\n<function=NAME>\n",
        end="</function>\n</seed:tool_call>",
        trigger="<seed:tool_call>",
        arguments=TaggedArguments("<parameter=KEY>\n", "\n</parameter>\n"),
    )
