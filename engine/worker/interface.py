"""What runs steps: the contract of `ModelRunner`, `PoolingRunner` and those of other devices."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult

# -- What plans name by handle: what isn't data, or too large to be sent with every plan.


class Attachments:
    """Objects by handle. Handles are never used twice."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, value: Any) -> int:
        """Hold an object; its handle."""
        handle = self._next
        self._next += 1
        self._held[handle] = value
        return handle

    def get(self, handle: int) -> Any:
        """The object. Raises KeyError for a handle that isn't held (any more)."""
        return self._held[handle]

    def remove(self, handle: int) -> None:
        """Let an object go; one that went already is no error."""
        self._held.pop(handle, None)


# -- `BitmaskInbox`: where a step finds its grammar masks, which come while its model runs.


class BitmaskInbox:
    """Masks of steps that were begun, by step. `publish` and `wait` may meet in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: dict[int, Future[GrammarOutput]] = {}

    def _of(self, step: int) -> Future[GrammarOutput]:
        with self._lock:
            return self._outputs.setdefault(step, Future())

    def publish(self, output: GrammarOutput) -> None:
        """A step's masks are there."""
        self._of(output.step).set_result(output)

    def wait(self, step: int) -> GrammarOutput:
        """A step's masks, once; waits until they are there.

        Raises RuntimeError where they couldn't be made.
        """
        output = self._of(step).result()
        with self._lock:
            # With those of steps before it that sampled nothing.
            for old in [key for key in self._outputs if key <= step]:
                del self._outputs[old]
        if output.failure:
            raise RuntimeError(output.failure)
        return output

    def clear(self) -> None:
        """Forget what steps that failed haven't taken."""
        with self._lock:
            self._outputs.clear()


class PendingStep(Protocol):
    """A step that was launched."""

    def finish(self) -> StepResult:
        """Wait for its result and take it over. Raises what the step ran into."""


@dataclass(frozen=True, slots=True)
class CompletedStep:
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

    def launch(self, plan: StepPlan, inputs: Any) -> PendingStep:
        """Begin a prepared step, after the one before; in the thread that does it for all."""

    def reset(self) -> None:
        """A step failed: nothing follows the last one any more."""
