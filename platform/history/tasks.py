"""Celery's tasks of this app."""

from __future__ import annotations

import logging

from celery import shared_task

from common.messaging import publish
from history.buckets import FINEST
from history.write import forget_old, write_history
from metering.redis_scripts import sync_client

logger = logging.getLogger(__name__)


@shared_task(name="history.write")
def write() -> None:
    """Write down what is over, and tell pages that are open."""
    client = sync_client()
    try:
        if starts := write_history(client):
            publish("history", {"until": starts[-1] + FINEST})
    finally:
        client.close()


@shared_task(name="history.forget")
def forget() -> None:
    """Remove what is kept no longer."""
    if removed := forget_old():
        logger.debug("removed %d old samples", removed)
