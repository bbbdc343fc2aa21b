"""The waiting queue of each `scheduling_policy`."""

from __future__ import annotations

from engine.scheduler.fair_queue import FairQueue
from engine.scheduler.queue import FCFSQueue, PriorityQueue, WaitingQueue

_QUEUES: dict[str, type[WaitingQueue]] = {
    "fair": FairQueue,
    "fcfs": FCFSQueue,
    "priority": PriorityQueue,
}


def make_queue(policy: str) -> WaitingQueue:
    """A new queue; `EngineConfig` has checked the name."""
    return _QUEUES[policy]()
