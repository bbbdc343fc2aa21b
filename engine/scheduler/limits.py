"""`StepLimits`: how much a step may hold."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduler.prefill_share import PrefillShare


@dataclass(slots=True)
class StepLimits:
    """How much a step may hold; set anew while the engine runs, as its speed is measured.

    Attributes:
        token_budget: tokens of a step.
        chunk: tokens of one sequence in a step, where prompts may be cut.
        chunked: whether they may.
        share: prompt tokens of a step in which others decode.
    """

    token_budget: int
    chunk: int
    chunked: bool
    share: PrefillShare

    @property
    def most_at_once(self) -> int:
        """Most tokens of one sequence in one step."""
        return min(self.token_budget, self.chunk) if self.chunked else self.token_budget
