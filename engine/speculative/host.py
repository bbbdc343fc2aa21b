"""`DraftHost`: what the core asks of whatever computes drafts beside a model."""

from __future__ import annotations

from typing import Protocol

from engine.scheduler.plan import StepPlan, StepResult
from engine.speculative.draft_facts import DraftFacts
from engine.speculative.head_plan import HeadFacts, HeadPlan, HeadResult


class DraftHost(Protocol):
    """A draft model, heads on the model's hidden states, or neither.

    Attributes:
        model: the draft model of `speculative_config`; None without one.
        heads: the heads of it; None without any.
    """

    @property
    def model(self) -> DraftFacts | None: ...

    @property
    def heads(self) -> HeadFacts | None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step of the draft model, which has a batch of its own; as `Executor.execute`."""

    def draw(self, plan: HeadPlan) -> HeadResult:
        """Have the heads draw for sequences that decode, between two steps."""
