"""gpt-oss: calls are messages to functions, which its reasoning parser has told apart already."""

from __future__ import annotations

from typing import ClassVar

from inference.tools.base import ToolParser
from inference.tools.layout import Layout


class HarmonyToolParser(ToolParser):
    """Says how an enforced call looks; there are no calls left to find in the content."""

    name = "gpt_oss"
    template_marks: ClassVar[tuple[str, ...]] = ("<|channel|>", "<|constrain|>")
    layout = Layout(
        begin="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        end="",
        free=False,
    )

    def _text(self) -> bool:
        return self._plain()
