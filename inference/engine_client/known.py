"""`Known`: what another gateway had of requests that are handed in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference.engine_client.journal import Bits


@dataclass(frozen=True, slots=True)
class Known:
    """[prompt][output] tokens, and whether an output is over; `bits`: [prompt], what made them;
    `epoch`: how often it was taken up.

    Engines know the requests by other ids in each epoch.
    """

    tokens: Sequence[Sequence[list[int]]]
    finished: Sequence[Sequence[bool]]
    bits: Sequence[Bits]
    epoch: int

    def of(self, number: int) -> tuple[Sequence[list[int]], Sequence[bool], Bits, int]:
        """Of one prompt."""
        return self.tokens[number], self.finished[number], self.bits[number], self.epoch
