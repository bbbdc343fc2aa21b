"""What runs steps: the contract of `ModelRunner`, `PoolingRunner` and those of other devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from engine.scheduler.plan import StepPlan, StepResult


class Finishable(Protocol):
    """A step that was launched."""

    def finish(self) -> StepResult:
        """Wait for its result and take it over. Raises what the step ran into."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that was run to its end at once."""

    result: StepResult

    def finish(self) -> StepResult:
        """The step's result."""
        return self.result


class Runner(Protocol):
    """Holds the running batch and runs its steps, one after the other."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises whatever the model raises; the batch stays usable."""

    def prepare(self, plan: StepPlan) -> Any:
        """Take over the plan's changes; the step's inputs, None for a plan without sequences.

        Called before the step before has run to its end, so it asks for none of its tokens.
        """

    def launch(self, plan: StepPlan, inputs: Any) -> Finishable:
        """Begin a prepared step, after the one before; in the thread that does it for all."""

    def forget(self) -> None:
        """A step failed: nothing follows the last one any more."""
