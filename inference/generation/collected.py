"""One output of an answer in one piece, put together from its increments."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference.generation.output import Increment, TokenEntry


@dataclass(slots=True)
class Collected:
    """All that came of an output so far; the fields are `Increment`'s."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, increment: Increment) -> None:
        """Add what is new."""
        self.text += increment.text
        self.token_ids += increment.token_ids
        self.entries += increment.entries
        self.finish_reason, self.stop_reason = increment.finish_reason, increment.stop_reason
