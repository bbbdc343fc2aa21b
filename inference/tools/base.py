"""What a tool parser is."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class ToolCallText:
    """One call. `arguments` is JSON text, as OpenAI has it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(slots=True)
class ParsedText:
    """What new text turned out to be: ordinary content, and calls that are complete."""

    content: str = ""
    calls: list[ToolCallText] = field(default_factory=list)

    def add(self, other: ParsedText) -> None:
        """Append what came later."""
        self.content += other.content
        self.calls += other.calls


class ToolParser(Protocol):
    """Takes an output's text apart, piece by piece; how it's cut into pieces changes nothing.

    Nothing is lost: what begins like a call and isn't one comes out as content.
    """

    def push(self, text: str) -> ParsedText:
        """What is certain after this text."""

    def flush(self) -> ParsedText:
        """The rest, now that the text has ended."""
