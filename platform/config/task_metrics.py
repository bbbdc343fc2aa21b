"""Metrics of Celery's tasks: durations, final states and queue lengths."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from typing import Any

from celery import Task, states
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.signals import before_task_publish, task_failure, task_postrun, task_prerun
from django.conf import settings
from redis.exceptions import RedisError

from inference.metrics.definitions import FAMILIES
from inference.metrics.flusher import metrics_key
from inference.metrics.queues import SENT_AT
from inference.metrics.recorder import field_of
from metering.redis_scripts import sync_client

logger = logging.getLogger(__name__)

TASK_SECONDS, TASKS = "quire_task_seconds", "quire_tasks"

#: Task id -> start time (`time.monotonic`) of the tasks that run in this process.
_began: dict[str, float] = {}
_killed: deque[str] = deque(maxlen=100)


@before_task_publish.connect
def _record_sending(headers: dict[str, Any], **_: object) -> None:
    headers[SENT_AT] = time.time()


@task_prerun.connect
def _record_start(task_id: str, **_: object) -> None:
    _began[task_id] = time.monotonic()


@task_postrun.connect
def _record_end(task_id: str, task: Task, state: str | None, **_: object) -> None:
    began = _began.pop(task_id, None)
    if state is not None and began is not None:  # state is None while the process is being killed
        record_task(task.name, state, time.monotonic() - began)


@task_failure.connect
def _record_killed(sender: Task, task_id: str, exception: Exception, **_: object) -> None:
    """Count a task that was killed with its process; its worker may report it twice."""
    if isinstance(exception, TimeLimitExceeded | WorkerLostError) and task_id not in _killed:
        _killed.append(task_id)
        record_task(sender.name, states.FAILURE)


def record_task(task: str, state: str, seconds: float | None = None) -> None:
    """Count a finished task immediately: a worker's child process may have no time to do it later.

    Args:
        state: Celery's name of the final state, such as "SUCCESS".
        seconds: duration; None if unknown because the process was killed.
    """
    key = metrics_key(settings.QUIRE.key_prefix)
    try:
        with sync_client() as client, client.pipeline(transaction=True) as pipe:
            pipe.hincrbyfloat(key, field_of(TASKS, (task, state), ""), 1)
            if seconds is not None:
                bucket = str(bisect_left(FAMILIES[TASK_SECONDS].buckets, seconds))
                pipe.hincrbyfloat(key, field_of(TASK_SECONDS, (task,), bucket), 1)
                pipe.hincrbyfloat(key, field_of(TASK_SECONDS, (task,), "sum"), seconds)
            pipe.execute()
    except (RedisError, OSError) as error:
        logger.debug("the end of the task %s was not counted: %s", task, error)
