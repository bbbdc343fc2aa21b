"""Asking a worker to do something, through Celery.

A message is a hint. What is to be done is in the database, and workers look there too, so a message
that is lost or comes twice changes nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

#: What a broker that is away raises.
BROKER_ERRORS = (OperationalError, RedisError, OSError)
logger = logging.getLogger(__name__)


def send_task(name: str, *arguments: Any, expires: float | None = None) -> None:
    """Hand a task over; workers drop one that is older than `expires` seconds.

    May block; raises kombu's OperationalError without a broker.
    """
    application = import_string(settings.QUIRE.celery_app)
    application.send_task(name, args=arguments, expires=expires, retry=False)


def send_task_best_effort(name: str, *arguments: Any, expires: float | None = None) -> None:
    """Hand a task over if there is a broker; workers find this work by themselves later."""
    try:
        send_task(name, *arguments, expires=expires)
    except BROKER_ERRORS as error:
        logger.warning("%s waits for the workers' next look: %s", name, error)
