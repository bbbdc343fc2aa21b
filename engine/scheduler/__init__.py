"""Decides which tokens each step computes."""

from engine.scheduler.plan import GrammarOutput, NewSequence, RewoundSequence, StepPlan, StepResult
from engine.scheduler.request import Request, Sequence, SequenceStatus
from engine.scheduler.scheduler import Scheduler

__all__ = [
    "GrammarOutput",
    "NewSequence",
    "Request",
    "RewoundSequence",
    "Scheduler",
    "Sequence",
    "SequenceStatus",
    "StepPlan",
    "StepResult",
]
