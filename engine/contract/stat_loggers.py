"""`StatLogger`: base class of plug-ins that receive a replica's statistics. Torch-free."""

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
    """Base of stat loggers; each replica creates those of the entry points `quire.stat_loggers`.

    Methods are called in the engine's thread: return at once, and run slow work in a thread. If one
    raises, the exception is logged, and the logger isn't called again.

    Args:
        config: the replica's settings.
        replica_id: its name, the label `engine` of metrics.
    """

    def __init__(self, config: EngineConfig, replica_id: str) -> None:
        self.config, self.replica_id = config, replica_id

    @abstractmethod
    def record(self, stats: EngineStats) -> None:
        """Receive current load and totals since the start, about every second. Copy values to keep
        them: `stats` is modified later.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Called when the replica stops."""


log = logging.getLogger(__name__)

INTERVAL_S = 1.0


class StatLoggers:
    """The selected stat loggers. Raises `ConfigError` for one that can't be created."""

    def __init__(self, config: EngineConfig, replica_id: str) -> None:
        self._loggers: list[StatLogger] = []
        self._last_record_time = 0.0
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
        """Call `record` of all loggers if the interval has passed."""
        now = time.monotonic()
        if self._loggers and now - self._last_record_time >= INTERVAL_S:
            self._last_record_time = now
            stats = snapshot()
            self._call_all(lambda logger: logger.record(stats))

    def close(self, stats: EngineStats) -> None:
        """Pass on the final statistics and close all loggers."""
        self._call_all(lambda logger: logger.record(stats))
        self._call_all(lambda logger: logger.close())

    def _call_all(self, call: Callable[[StatLogger], None]) -> None:
        """Drop a logger that raises: requests matter more than its statistics."""
        for logger in list(self._loggers):
            try:
                call(logger)
            except Exception:
                log.exception("%s failed and isn't called again.", type(logger).__name__)
                self._loggers.remove(logger)
