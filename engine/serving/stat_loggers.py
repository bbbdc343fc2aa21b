"""Loggers that installed packages bring, told the replica's figures every second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.plugins import loaded, wanted
from engine.contract.replica_state import EngineStats
from engine.contract.stat_logger import GROUP, StatLogger

log = logging.getLogger(__name__)

INTERVAL_S = 1.0


class StatLoggers:
    """Makes those that are wanted. Raises `ConfigError` for one that can't be made."""

    def __init__(self, config: EngineConfig, replica_id: str) -> None:
        self._loggers: list[StatLogger] = []
        self._at = 0.0
        for point in wanted(GROUP):
            kind = loaded(point, StatLogger)  # type: ignore[type-abstract]
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
