"""`WireWorker`: plans, bitmasks, results and facts go through bytes, as between two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from engine.contract.engine_config import EngineConfig
from engine.distributed.memory import RankMemory
from engine.distributed.pipeline import StageSockets
from engine.executor.abstract import Capacity
from engine.executor.draft_worker import DraftWorkers
from engine.executor.worker import Worker
from engine.models.interface import ModelFacts
from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult
from engine.speculative.interface import HeadPlan, HeadResult
from engine.worker.interface import PendingStep

T = TypeVar("T")


def sent(message: T) -> T:
    """What arrives of a message; what goes lost on the way is a failure."""
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
    assert arrived == message
    return arrived


class _SentStep:
    """A step whose result comes over the wire."""

    def __init__(self, step: PendingStep) -> None:
        self._step = step

    def finish(self) -> StepResult:
        return sent(self._step.finish())


class _SentDrafts(DraftWorkers):
    """Drafts whose plans and results come over the wire."""

    def execute(self, plan: StepPlan) -> StepResult:
        return sent(super().execute(sent(plan)))

    def propose(self, plan: HeadPlan) -> HeadResult:
        return sent(super().propose(sent(plan)))


class WireWorker(Worker):
    """The worker that engines of the tests run on."""

    def __init__(
        self,
        config: EngineConfig,
        memory: RankMemory | None = None,
        stage_sockets: StageSockets | None = None,
        expert_memory: RankMemory | None = None,
    ) -> None:
        super().__init__(config, memory, stage_sockets, expert_memory)
        self.drafts = _SentDrafts(self._use_threads)

    def load(self, progress: Callable[[int, int], None]) -> ModelFacts:
        return sent(super().load(progress))

    def determine_available_blocks(self) -> Capacity:
        return sent(super().determine_available_blocks())

    def execute(self, plan: StepPlan) -> StepResult:
        return sent(super().execute(sent(plan)))

    def prepare(self, plan: StepPlan) -> Any:
        return super().prepare(sent(plan))

    def launch(self, plan: StepPlan, inputs: Any) -> PendingStep:
        return _SentStep(super().launch(sent(plan), inputs))

    def send_bitmask(self, output: GrammarOutput) -> None:
        super().send_bitmask(sent(output))
