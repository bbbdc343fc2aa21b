"""Celery's tasks of this app."""

import logging

from celery import shared_task

from metering.alerts import send_alerts

logger = logging.getLogger(__name__)


@shared_task(name="metering.alerts", ignore_result=True, acks_late=False)
def alerts() -> None:
    """Tell tenants of budgets that are nearly spent."""
    if told := send_alerts():
        logger.info("told of %d budgets", told)
