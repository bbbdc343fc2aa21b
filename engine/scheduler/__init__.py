"""Decides which tokens each step computes."""

from engine.scheduler.plan import GrammarOutput, NewSequence, Rewound, StepPlan, StepResult
from engine.scheduler.request import Request, Sequence, Status
from engine.scheduler.scheduler import Scheduler

__all__ = [
    "GrammarOutput",
    "NewSequence",
    "Request",
    "Rewound",
    "Scheduler",
    "Sequence",
    "Status",
    "StepPlan",
    "StepResult",
]
