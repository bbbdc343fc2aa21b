"""`StatLogger`: what a package subclasses to be told a replica's figures. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine.contract.config import EngineConfig
from engine.contract.replica_state import EngineStats

GROUP = "quire.stat_loggers"


class StatLogger(ABC):
    """One is made in each replica, by the entry points of `quire.stat_loggers`.

    Everything is called in the engine's own thread: return at once, and hand slow work to a thread.
    A method that raises is told in the replica's log, and the logger isn't called again.

    Args:
        config: the replica's settings.
        replica_id: its name, the label `engine` of metrics.
    """

    def __init__(self, config: EngineConfig, replica_id: str) -> None:
        self.config, self.replica_id = config, replica_id

    @abstractmethod
    def record(self, stats: EngineStats) -> None:
        """About every second: load as of now, totals since the start. Keep nothing of `stats`
        itself: it goes on to change.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """The replica ends."""
