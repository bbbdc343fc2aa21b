"""Interfaces of runners: `ModelRunner`, `PoolingRunner` and those of other devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult


class Attachments:
    """Objects that plans refer to by handle: functions, and tensors too large to send in each plan.

    Handles are never reused.
    """

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, value: Any) -> int:
        """Add an object; returns its handle."""
        handle = self._next
        self._next += 1
        self._objects[handle] = value
        return handle

    def get(self, handle: int) -> Any:
        """The object. Raises KeyError for an unknown or removed handle."""
        return self._objects[handle]

    def remove(self, handle: int) -> None:
        """Remove an object; does nothing if it has been removed already."""
        self._objects.pop(handle, None)


class BitmaskInbox:
    """Grammar bitmasks by step, which are computed while the model runs.

    `publish` and `wait` may be called in any order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: dict[int, Future[GrammarOutput]] = {}

    def _future(self, step: int) -> Future[GrammarOutput]:
        with self._lock:
            return self._outputs.setdefault(step, Future())

    def publish(self, output: GrammarOutput) -> None:
        """Store a step's bitmasks."""
        self._future(output.step).set_result(output)

    def wait(self, step: int) -> GrammarOutput:
        """Wait for a step's bitmasks and remove them.

        Raises RuntimeError if they couldn't be computed.
        """
        output = self._future(step).result()
        with self._lock:
            # Bitmasks of earlier steps that sampled nothing are still there.
            for old in [key for key in self._outputs if key <= step]:
                del self._outputs[old]
        if output.failure:
            raise RuntimeError(output.failure)
        return output

    def clear(self) -> None:
        """Remove the bitmasks of failed steps."""
        with self._lock:
            self._outputs.clear()


class PendingStep(Protocol):
    """A step that was launched."""

    def finish(self) -> StepResult:
        """Wait for the result and write it to the batch. Raises the step's error."""


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that has run."""

    result: StepResult

    def finish(self) -> StepResult:
        return self.result


class Runner(Protocol):
    """Holds the running batch and runs its steps, one after the other."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises what the model raises; the batch stays usable."""

    def prepare(self, plan: StepPlan) -> Any:
        """Apply the plan's changes; returns the step's inputs, or None for a plan without
        sequences.

        Called before the previous step has finished, so it must not read that step's tokens.
        """

    def launch(self, plan: StepPlan, inputs: Any) -> PendingStep:
        """Start a prepared step after the previous one; always called in the same thread."""

    def reset(self) -> None:
        """Forget the previous step after a step has failed."""


@runtime_checkable
class TimesForward(Protocol):
    """A runner whose forward passes can be measured."""

    def wrap_forward(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wrap the model's forward pass with `wrap`."""
