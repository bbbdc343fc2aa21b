"""Decides which tokens each step computes."""

from engine.scheduler.plan import GrammarOutput, NewSequence, Rewound, StepPlan, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request, Sequence, Status

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
