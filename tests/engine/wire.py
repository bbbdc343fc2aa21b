"""`WireExecutor`: every plan, mask and result goes through bytes, as between two processes."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from engine.contract.engine_config import EngineConfig
from engine.executor.abstract import StepFuture
from engine.executor.draft_worker import DraftWorkers
from engine.executor.uniproc_executor import UniProcExecutor
from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult
from engine.speculative.interface import HeadPlan, HeadResult

T = TypeVar("T", bound=msgspec.Struct)


def sent(message: T) -> T:
    """What arrives of a message; what goes lost on the way is a failure."""
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
    assert arrived == message
    return arrived


class _Sent:
    """An outcome whose result comes over the wire."""

    def __init__(self, outcome: StepFuture) -> None:
        self._outcome = outcome

    def result(self) -> StepResult:
        return sent(self._outcome.result())

    def exception(self) -> BaseException | None:
        return self._outcome.exception()


class _SentDrafts(DraftWorkers):
    """Drafts whose plans and results come over the wire."""

    def execute(self, plan: StepPlan) -> StepResult:
        return sent(super().execute(sent(plan)))

    def propose(self, plan: HeadPlan) -> HeadResult:
        return sent(super().propose(sent(plan)))


class WireExecutor(UniProcExecutor):
    """The executor that engines of the tests run on."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.drafts = _SentDrafts(self._begin)

    def execute(self, plan: StepPlan) -> StepResult:
        return sent(super().execute(sent(plan)))

    def apply_plan(self, plan: StepPlan) -> None:
        super().apply_plan(sent(plan))

    def execute_async(self, plan: StepPlan) -> StepFuture:
        return _Sent(super().execute_async(sent(plan)))

    def send_bitmask(self, output: GrammarOutput) -> None:
        super().send_bitmask(sent(output))
