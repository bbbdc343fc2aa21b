"""Mistral's ways: a list of objects, or (newer) names with their arguments."""

from __future__ import annotations

import re
from typing import ClassVar

from inference.tools.layout import Layout
from inference.tools.objects import ObjectListParser

OPEN = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*(?P<name>[\w.-]{1,64})(\[CALL_ID\][A-Za-z0-9]*)?\s*(\[ARGS\])?\s*(?=\{)")


class MistralParser(ObjectListParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`; reads `[TOOL_CALLS]name{...}` as well."""

    name = "mistral"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN,)
    openers = (OPEN,)
    markers = (OPEN, "[ARGS]", "[CALL_ID]")
    layout = Layout(
        open=f"{OPEN}[",
        begin='{"name": "NAME", "arguments": ',
        end="}",
        separator=", ",
        close="]",
        trigger=OPEN,
    )

    def _no_list(self) -> bool:
        self._state = self._named
        return True

    def _named(self) -> bool:
        header = self._header(_NAME)
        if header is None:
            return False
        if header is False:
            return self._fail(self._opening)
        self._call(header["name"])
        self._state = self._bare_arguments
        return True

    def _bare_arguments(self) -> bool:
        return self._in_value(self._after_arguments)

    def _after_arguments(self) -> bool:
        self._state = self._text
        return True


class MistralNamedParser(MistralParser):
    """The same for models that write `[TOOL_CALLS]name[ARGS]{...}`, when calls are enforced."""

    name = "mistral_named"
    template_marks: ClassVar[tuple[str, ...]] = (OPEN, "[ARGS]")
    layout = Layout(begin=f"{OPEN}NAME[ARGS]", end="", separator="", trigger=OPEN)
