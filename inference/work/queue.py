"""Asking a worker to do something, through Celery.

A message is a hint. What is to be done is in the database, and workers look there too
(`inference.tasks.sweep`), so a message that is lost or comes twice changes nothing.
"""

from __future__ import annotations

import asyncio
import logging

from django.conf import settings
from django.utils.module_loading import import_string
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

RUN = "inference.run"


async def enqueue(kind: str, public_id: str) -> None:
    """Tell workers of a batch or a response. Without Redis they find it by themselves, later."""
    try:
        await asyncio.to_thread(send, kind, public_id)
    except (OperationalError, RedisError, OSError) as error:
        logger.warning("%s %s waits for the next sweep: %s", kind, public_id, error)


def send(kind: str, public_id: str) -> None:
    """The same, blocking. Raises kombu's OperationalError when the broker can't be reached."""
    application = import_string(settings.QUIRE["CELERY_APP"])
    application.send_task(RUN, args=[kind, public_id], ignore_result=True, retry=False)
