"""Measures a step's time in the model's forward pass, and in the worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.interface import CompletedStep, PendingStep, Runner, TimesForward

_P = ParamSpec("_P")
_T = TypeVar("_T")


class TimedRunner(Runner):
    """A runner whose results include the duration of their steps.

    On a GPU it synchronizes with the device around each forward pass, so steps don't overlap.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        model: bool,
        worker: bool,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """`model`, `worker`: measure the forward pass, and the worker. `synchronize` waits for the
        device; None: it has no queue.

        The forward pass of a `TimesForward` is measured. If one compiled call computes and samples,
        its total is measured.
        """
        self._runner, self._worker = runner, worker
        self._wait_for_device = synchronize
        self._forward_seconds = 0.0
        if model and isinstance(runner, TimesForward):
            runner.wrap_forward(self._timed)

    def _timed(self, forward: Callable[_P, _T]) -> Callable[_P, _T]:
        def timed(*args: _P.args, **options: _P.kwargs) -> _T:
            self._synchronize()
            started = time.perf_counter()
            result = forward(*args, **options)
            self._synchronize()
            self._forward_seconds += time.perf_counter() - started
            return result

        return timed

    def _synchronize(self) -> None:
        if self._wait_for_device is not None:
            self._wait_for_device()

    def _finish(self, result: StepResult, started: float) -> StepResult:
        result.forward_seconds, self._forward_seconds = self._forward_seconds, 0.0
        if self._worker:
            self._synchronize()
            result.execute_seconds = time.perf_counter() - started
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        return self._finish(self._runner.execute(plan), started)

    def prepare(self, plan: StepPlan) -> Any:
        return self._runner.prepare(plan)

    def launch(self, plan: StepPlan, inputs: Any) -> PendingStep:
        started = time.perf_counter()
        pending = self._runner.launch(plan, inputs)
        if isinstance(pending, CompletedStep):  # once its result is requested, the next one may run
            return CompletedStep(self._finish(pending.result, started))
        return _TimedStep(pending, lambda result: self._finish(result, started))

    def reset(self) -> None:
        self._forward_seconds = 0.0
        self._runner.reset()


class _TimedStep:
    """A step whose time ends when its result is first available on request."""

    def __init__(self, step: PendingStep, finish: Callable[[StepResult], StepResult]) -> None:
        self._step, self._finish_timing = step, finish
        self._result: StepResult | None = None

    def finish(self) -> StepResult:
        if self._result is None:
            self._result = self._finish_timing(self._step.finish())
        return self._result
