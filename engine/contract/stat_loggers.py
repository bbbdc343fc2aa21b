"""`StatLogger`: what a package subclasses to be told a replica's figures. Torch-free."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.plugins import load_subclass, selected_entry_points
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


# -- Loggers that installed packages bring, told the replica's figures every second.


log = logging.getLogger(__name__)

INTERVAL_S = 1.0


class StatLoggers:
    """Makes those that are wanted. Raises `ConfigError` for one that can't be made."""

    def __init__(self, config: EngineConfig, replica_id: str) -> None:
        self._loggers: list[StatLogger] = []
        self._at = 0.0
        for point in selected_entry_points(GROUP):
            kind = load_subclass(point, StatLogger)  # type: ignore[type-abstract]
            try:
                self._loggers.append(kind(config, replica_id))
            except Exception as error:
                raise ConfigError(
                    f"The stat logger {point.name} ({point.value}) can't be made: {error}",
                    param="QUIRE_PLUGINS",
                ) from error
            log.info("Stat logger %s (%s) loaded", point.name, point.value)

    def maybe(self, snapshot: Callable[[], EngineStats]) -> None:
        """Tell them, if there are any and the interval is over."""
        now = time.monotonic()
        if self._loggers and now - self._at >= INTERVAL_S:
            self._at = now
            stats = snapshot()
            self._each(lambda each: each.record(stats))

    def close(self, stats: EngineStats) -> None:
        """Tell them the last figures, and the end."""
        self._each(lambda each: each.record(stats))
        self._each(lambda each: each.close())

    def _each(self, call: Callable[[StatLogger], None]) -> None:
        """One that raises is dropped: requests matter more than its figures."""
        for each in list(self._loggers):
            try:
                call(each)
            except Exception:
                log.exception("%s failed and isn't called again.", type(each).__name__)
                self._loggers.remove(each)
