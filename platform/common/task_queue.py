"""Sending work to a worker through Celery.

A message is a hint. The work itself is in the database, where workers look too, so a message that
is lost or duplicated changes nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from common.errors import ServiceUnavailable
from common.installation import PROGRAM
from engine.system import redis_client

#: Errors of a broker that is down.
BROKER_ERRORS = (OperationalError, RedisError, OSError)
logger = logging.getLogger(__name__)


def send_task(name: str, *arguments: Any, expires: float | None = None) -> None:
    """Send a task; workers drop it if it is older than `expires` seconds.

    May block; raises kombu's OperationalError without a broker.
    """
    application = import_string(settings.QUIRE.celery_app)
    application.send_task(name, args=arguments, expires=expires, retry=False)


def send_task_best_effort(name: str, *arguments: Any, expires: float | None = None) -> None:
    """Send a task if there is a broker; otherwise workers find the work later."""
    try:
        send_task(name, *arguments, expires=expires)
    except BROKER_ERRORS as error:
        logger.warning("%s waits for the workers' next look: %s", name, error)


def scheduler_lock() -> str:
    """Key of the lock that a worker holds while it sends periodic tasks."""
    return f"{settings.QUIRE.key_prefix}:celery:scheduler"


def check_worker() -> None:
    """Raise `ServiceUnavailable` (503) if `up --no-worker` started this process and no worker runs.

    For requests that wait for a worker's answer. Blocks on Redis.
    """
    if not settings.QUIRE.without_worker:
        return
    client = redis_client.sync_client(settings.REDIS_URL)
    try:
        running = client.exists(scheduler_lock())
    finally:
        client.close()
    if not running:
        raise ServiceUnavailable(
            "A worker must check the adapter, and this server was started with --no-worker. Start "
            f"one with `{PROGRAM} worker`."
        )
