"""What comes of a step that was begun."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from engine.scheduler.plan import StepResult
from engine.worker.interface import Finishable


class Outcome(Protocol):
    """A step's result, which may be still to come; a future is one."""

    def result(self) -> StepResult:
        """Wait for it. Raises what the step ran into."""

    def exception(self) -> BaseException | None:
        """Wait for it; what the step ran into, if anything."""


class Launched:
    """A step whose launch comes from a thread, and whose result from the device."""

    def __init__(self, launch: Future[Finishable]) -> None:
        self._launch = launch

    def result(self) -> StepResult:
        """See `Outcome`."""
        return self._launch.result().finish()

    def exception(self) -> BaseException | None:
        """See `Outcome`."""
        try:
            self.result()
        except Exception as error:  # handed over, as a future does
            return error
        return None
