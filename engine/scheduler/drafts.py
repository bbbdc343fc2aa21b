"""`DraftSource`: who guesses at the tokens that running sequences will get."""

from __future__ import annotations

from typing import Protocol

from engine.scheduler.sequence import Sequence


class DraftSource(Protocol):
    """What the scheduler asks; `engine.speculative` answers."""

    def propose(self, decoding: list[Sequence], room: int) -> dict[int, list[int]]:
        """Drafts by sequence id, at most `room` in all, for sequences that decode in a step."""

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts were checked: so many of the first ones held."""
