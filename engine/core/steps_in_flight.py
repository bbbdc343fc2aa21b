"""`StepsInFlight`: the steps that were started and whose results haven't been processed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from engine.executor.abstract import Executor, StepFuture
from engine.scheduler import GrammarOutput, Sequence, StepPlan, StepResult
from engine.structured_output.manager import StructuredOutputManager


@dataclass(slots=True)
class StepInFlight:
    """A step that was started.

    Attributes:
        scheduled: the plan's sequences, in its order.
        bitmask: the tokens that grammars allow; None: not computed yet, or not needed.
    """

    plan: StepPlan
    scheduled: list[Sequence]
    result: StepFuture
    bitmask: Future[GrammarOutput] | None = None


class StepsInFlight:
    """Starts steps, and the computation of their bitmasks; oldest first.

    Args:
        overlaps: a step runs while the next one is planned.
        pipelined: steps in flight hold different sequences.
    """

    def __init__(
        self,
        executor: Executor,
        structured: StructuredOutputManager,
        *,
        overlaps: bool,
        pipelined: bool,
    ) -> None:
        self._executor, self._structured = executor, structured
        self._overlaps, self._pipelined = overlaps, pipelined
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for step in self._steps for sequence in step.scheduled]

    def wait_until_failed(self) -> bool:
        """Wait for the steps up to the first that fails; whether one failed."""
        return any(step.result.exception() for step in self._steps)

    def start(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        """Execute a plan; with async scheduling its result is still pending then."""
        bitmask = self._start_bitmask(plan)
        self._steps.append(StepInFlight(plan, scheduled, self._execute(plan), bitmask))

    def _start_bitmask(self, plan: StepPlan) -> Future[GrammarOutput] | None:
        """Start computing a new step's bitmask. With a step in flight it must wait for that step's
        tokens.
        """
        if not self._structured.needs_bitmask:
            return None
        if self._steps and not self._pipelined:
            plan.awaits_bitmask = True
            return None
        bitmask = self._make_bitmask(plan)
        plan.awaits_bitmask = bitmask is not None
        return bitmask

    def _make_bitmask(self, plan: StepPlan) -> Future[GrammarOutput] | None:
        """Compute a step's bitmask in another thread, and send it to the executor."""
        bitmask = self._structured.start_bitmask(plan)
        if bitmask is not None:
            bitmask.add_done_callback(
                partial(_send_bitmask, self._executor.send_bitmask, plan.step)
            )
        return bitmask

    def _execute(self, plan: StepPlan) -> StepFuture:
        if self._overlaps:
            return self._executor.execute_async(plan)
        result: Future[StepResult] = Future()
        try:
            result.set_result(self._executor.execute(plan))
        except Exception as error:  # `pop_oldest` raises it
            result.set_exception(error)
        return result

    @property
    def oldest(self) -> StepInFlight:
        """The next step to be processed."""
        return self._steps[0]

    def pop_oldest(self) -> tuple[StepResult, GrammarOutput | None]:
        """Wait for the oldest step, and forget it. Raises what the step raised; it stays then."""
        step = self._steps[0]
        result = step.result.result()
        bitmask = None if step.bitmask is None else step.bitmask.result()
        # Not earlier: if the wait is interrupted, the step must remain for the next call.
        self._steps.popleft()
        return result, bitmask

    def start_late_bitmasks(self) -> None:
        """Compute bitmasks that waited for the tokens of the oldest step, which are known now."""
        for step in self._steps:
            if step.plan.awaits_bitmask and not self._pipelined:
                step.bitmask = self._make_bitmask(step.plan)
                if step.bitmask is None:
                    self._executor.send_bitmask(GrammarOutput(step.plan.step))

    def pop_all(self) -> list[StepInFlight]:
        """Wait for all steps, whether they fail or not, and forget them."""
        steps = list(self._steps)
        self._steps.clear()
        for step in steps:
            step.result.exception()
            if step.bitmask is not None:
                step.bitmask.exception()
        return steps


def _send_bitmask(
    send: Callable[[GrammarOutput], None], step: int, bitmask: Future[GrammarOutput]
) -> None:
    """Send a step its bitmask, or the error that computing it raised."""
    error = bitmask.exception()
    send(bitmask.result() if error is None else GrammarOutput(step, failure=f"Masks: {error!r}"))
