"""gpt-oss: calls are messages to functions, which its reasoning parser has told apart already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from inference.reasoning.harmony import CHANNEL, MESSAGE, START
from inference.tools.base import ToolParser
from inference.tools.layout import Layout, literal

FINAL = f"{CHANNEL}final{MESSAGE}"
#: What ends a message and begins the next one.
NEXT = f"<|end|>{START}assistant"


@dataclass(frozen=True)
class MessagesLayout(Layout):
    """An answer is messages, each with its header: more thoughts, and then calls or the text."""

    def _calls_or_text(self, special: dict[str, int], parallel: bool) -> list[str]:
        headers = [f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "commentary")]
        before = " | ".join(literal(header, special) for header in headers)
        calls, final = self._all_calls(special, parallel), literal(FINAL, special)
        return [
            f"start: before* ({calls} | {final} TEXT)",
            f"before: ({before}) TEXT {literal(NEXT, special)}",
            r"TEXT: /(.|\n)*/",
        ]


class HarmonyToolParser(ToolParser):
    """Says how an enforced call looks; there are no calls left to find in the content."""

    name = "gpt_oss"
    template_marks: ClassVar[tuple[str, ...]] = ("<|channel|>", "<|constrain|>")
    layout = MessagesLayout(
        begin=f"{CHANNEL}commentary to=functions.NAME <|constrain|>json{MESSAGE}",
        end="",
        separator=NEXT,
        before_answer=FINAL,
    )

    def _text(self) -> bool:
        return self._plain()
