"""The workers' schedule, for machines whose clock is set back."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import Any

from celery.beat import Scheduler

logger = logging.getLogger(__name__)

#: Less is how clocks are kept right.
SET_BACK = timedelta(seconds=1)


class SteadyScheduler(Scheduler):  # type: ignore[misc]
    """Celery's own, which counts from when it last asked for a task by the clock on the wall.

    Where that goes an hour back nothing would be due for an hour: the count begins anew.
    """

    _seen: datetime | None = None

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Ask for what is due; seconds until the next look."""
        now: datetime = self.app.now()
        if self._seen is not None and now < self._seen - SET_BACK:
            logger.warning("clock set back, schedule restarted")
            for entry in self.schedule.values():
                entry.last_run_at = now
            self._heap = None
        self._seen = now
        wait: float = super().tick(*args, **kwargs)
        return wait
