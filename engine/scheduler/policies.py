"""The waiting queue of each `scheduling_policy`."""

from __future__ import annotations

from engine.contract.config import EngineConfig
from engine.scheduler.fair_queue import FairQueue
from engine.scheduler.queue import FCFSQueue, PriorityQueue, WaitingQueue


def make_queue(config: EngineConfig) -> WaitingQueue:
    """A new queue; the configuration has checked the policy's name."""
    match config.scheduling_policy:
        case "fair":
            return FairQueue(config.prompt_overtaking)
        case "priority":
            return PriorityQueue()
        case _:
            return FCFSQueue()
