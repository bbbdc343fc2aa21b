"""`Known`: what another gateway had of requests that are handed in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """[prompt][output] tokens, and whether an output is over; `epoch`: how often it was taken up.

    Engines know the requests by other ids in each epoch.
    """

    tokens: Sequence[Sequence[list[int]]]
    finished: Sequence[Sequence[bool]]
    epoch: int

    def of(self, number: int) -> tuple[Sequence[list[int]], Sequence[bool], int]:
        """Of one prompt."""
        return self.tokens[number], self.finished[number], self.epoch
