"""Log lines that thousands of requests would write within a minute, one each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

#: The first is written at once; of the others one in so many seconds, with how many they were.
EVERY_S = 10.0


class Seldom:
    """Writes warnings of one kind now and then."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._written_at, self._left_out = -EVERY_S, 0

    def warning(self, text: str, *given: object) -> None:
        """Write it, or count it."""
        now = self._clock()
        if now - self._written_at < EVERY_S:
            self._left_out += 1
            return
        if self._left_out:
            text, given = f"{text} (and %d more like it before)", (*given, self._left_out)
        self._written_at, self._left_out = now, 0
        self._logger.warning(text, *given)
