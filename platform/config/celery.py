"""The Celery application. `manage.py worker` runs it."""

from __future__ import annotations

import logging
import os
import time
import uuid
from datetime import datetime, timedelta
from typing import Any

import redis
from celery import Celery
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import crontab
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown
from django.conf import settings

from common.locks import hold_lock_sync
from common.task_queue import scheduler_lock
from config import task_metrics  # noqa: F401 - connects Celery's signals
from engine.system import redis_client
from engine.system.redis_client import is_temporary

logger = logging.getLogger(__name__)

#: Interval between checks whether Redis accepts writes again.
POLL_INTERVAL_S = 0.25


class WaitForRedisConsumer(Consumer):
    """A consumer that connects only once Redis accepts writes.

    Celery's consumer restarts at once when a write is refused, five times a second, losing its
    connection each time. When nothing answers, it backs off for longer and longer.
    """

    def connect(self) -> Any:
        """Connect. Raises WorkerShutdown when the worker is asked to stop meanwhile."""
        wait_for_writes(settings.REDIS_URL)
        return super().connect()


def wait_for_writes(url: str) -> None:
    """Return when Redis accepts a write, or refuses it permanently (the next command then reports
    the error)."""
    client = redis_client.sync_client(url)
    warned = False
    try:
        while (error := _refusal(client)) is not None:
            if not warned:
                logger.warning("messages wait until Redis takes writes: %s", error)
            warned = True
            maybe_shutdown()
            time.sleep(POLL_INTERVAL_S)
    finally:
        client.close()
    if warned:
        logger.warning("Redis takes writes again")


def _refusal(client: redis.Redis) -> redis.RedisError | None:
    try:
        client.set(f"{settings.QUIRE.key_prefix}:celery:takes-writes", "", px=1000)
    except redis.RedisError as error:
        return error if is_temporary(error) else None
    return None


#: Clock adjustments below this are normal, for example by NTP.
CLOCK_JUMP = timedelta(seconds=1)


class ClockSafeScheduler(Scheduler):
    """Celery's scheduler, made safe against a clock that is set back.

    Celery counts from the wall-clock time of the last run: if the clock is set back by an hour, no
    task would be due for an hour. This class restarts the count instead.
    """

    _seen: datetime | None = None

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send the tasks that are due; return the seconds until the next check."""
        now: datetime = self.app.now()
        if self._seen is not None and now < self._seen - CLOCK_JUMP:
            logger.warning("clock set back, schedule restarted")
            for entry in self.schedule.values():
                entry.last_run_at = now
            self._heap = None
        self._seen = now
        wait: float = super().tick(*args, **kwargs)
        return wait


#: Seconds after which a silent worker loses the scheduler's lock to another one.
SCHEDULER_LOCK_S = 10.0


class SingleScheduler(ClockSafeScheduler):
    """The scheduler of one of several workers: only the holder of a lock in Redis sends tasks.

    The others track the schedule without sending, so that a worker that takes over knows what is
    due. It also sends the tasks that came due while no one held the lock: a task may run twice, but
    is never lost.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._id = uuid.uuid4().hex
        self._client = redis_client.sync_client(settings.REDIS_URL)
        self._holds_lock = False
        self._unsent: dict[str, tuple[float, ScheduleEntry]] = {}
        super().__init__(*args, **kwargs)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        self._holds_lock = self._acquire_or_extend_lock()
        if self._holds_lock and self._unsent:
            oldest = time.monotonic() - SCHEDULER_LOCK_S
            for since, entry in self._unsent.values():
                if since >= oldest:
                    super().apply_entry(entry, producer=self.producer)
            self._unsent.clear()
        return min(super().tick(*args, **kwargs), SCHEDULER_LOCK_S / 3)

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        if self._holds_lock:
            super().apply_entry(entry, producer=producer)
        else:
            self._unsent[str(entry.name)] = (time.monotonic(), entry)

    def _acquire_or_extend_lock(self) -> bool:
        try:
            return hold_lock_sync(self._client, scheduler_lock(), self._id, SCHEDULER_LOCK_S)
        except (redis.RedisError, OSError) as error:
            logger.debug("the scheduler's lock is out of reach: %s", error)
            return False


os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

app = Celery("quire")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@app.on_after_configure.connect
def _schedule(sender: Celery, **_: object) -> None:
    """Set beat's schedule. Tasks expire before the next one of their kind is due."""
    every = settings.QUIRE.sweep_seconds
    sender.conf.beat_schedule = {
        "sweep": {"task": "inference.sweep", "schedule": every, "options": {"expires": every}},
        "adapters": {"task": "adapters.sweep", "schedule": every, "options": {"expires": every}},
        "pins": {"task": "adapters.pins", "schedule": every, "options": {"expires": every}},
        "alerts": {"task": "metering.alerts", "schedule": 60.0, "options": {"expires": 60.0}},
        "webhooks": {"task": "metering.deliveries", "schedule": 60.0, "options": {"expires": 60.0}},
        "sums": {"task": "metering.check_sums", "schedule": crontab(hour="1", minute="10")},
        "history": {"task": "history.write", "schedule": 10.0, "options": {"expires": 10.0}},
        "rules": {"task": "history.alerts", "schedule": 60.0, "options": {"expires": 60.0}},
        "forget": {"task": "history.forget", "schedule": 300.0, "options": {"expires": 300.0}},
        "sign-on": {"task": "console.sign_on", "schedule": 60.0, "options": {"expires": 60.0}},
        "retention": {
            "task": "metering.retention",
            "schedule": 3600.0,
            "options": {"expires": 3600.0},
        },
        "audit": {
            "task": "tenants.audit_retention",
            "schedule": 3600.0,
            "options": {"expires": 3600.0},
        },
        "sessions": {
            "task": "accounts.clear_sessions",
            "schedule": 3600.0,
            "options": {"expires": 3600.0},
        },
        "erasures": {"task": "tenants.erasures", "schedule": 300.0, "options": {"expires": 300.0}},
        "expire": {"task": "inference.expire", "schedule": 300.0, "options": {"expires": 300.0}},
    }
