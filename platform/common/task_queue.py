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
