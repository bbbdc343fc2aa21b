"""`RankedStep`: a step that all ranks run at the same time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from engine.executor.abstract import StepFuture
from engine.scheduler.plan import StepResult


class _Executor(Protocol):
    def finish(self, step: int, launched: StepFuture) -> StepFuture:
        """Sample the tokens of a launched step."""

    def explain_failure(self, step: int) -> AbstractContextManager[None]:
        """Context of the wait for a step: the error that it raises names the rank."""


class RankedStep:
    """A step that all ranks run."""

    def __init__(self, executor: _Executor, step: int, launched: StepFuture) -> None:
        self._executor, self._step, self._launched = executor, step, launched
        self._tokens: StepFuture | None = None
        self._outcome: StepResult | BaseException | None = None

    def result(self) -> StepResult:
        if self._outcome is None:  # the tokens of a step are sampled once
            try:
                if self._tokens is None:
                    self._tokens = self._executor.finish(self._step, self._launched)
                self._tokens.exception()  # interrupting this wait must not fail the step
                with self._executor.explain_failure(self._step):
                    self._outcome = self._tokens.result()
            except Exception as error:
                self._outcome = error
                raise
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def exception(self) -> BaseException | None:
        try:
            self.result()
        except Exception as error:  # returned, as futures do
            return error
        return None
