"""Celery tasks of this app."""

from __future__ import annotations

import logging

from celery import shared_task

from common.messaging import broadcast_sync
from history.alerts import check_rules, forget_old_alerts
from history.buckets import MIN_WIDTH_S
from history.write import delete_expired, write_history
from metering.redis_scripts import sync_client

logger = logging.getLogger(__name__)


@shared_task(name="history.write")
def write() -> None:
    """Write past buckets to the database and notify open pages."""
    client = sync_client()
    try:
        if starts := write_history(client):
            broadcast_sync("history", {"until": starts[-1] + MIN_WIDTH_S})
    finally:
        client.close()


@shared_task(name="history.forget")
def forget() -> None:
    """Remove rows whose retention has expired."""
    if removed := delete_expired() + forget_old_alerts():
        logger.debug("removed %d old samples and alerts", removed)


@shared_task(name="history.alerts")
def alerts() -> None:
    """Check the rules of alerts and notify operators of new ones."""
    if num_open := check_rules():
        logger.info("%d alerts are open", num_open)
