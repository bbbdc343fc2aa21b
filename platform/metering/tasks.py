"""Celery tasks of this app."""

import logging

from celery import shared_task

from metering.alerts import send_budget_alerts
from metering.reconciliation import prune_counters, reconcile, verify_rollups
from metering.redis_scripts import sync_client
from metering.retention import delete_expired_usage, remove_old_requests
from metering.webhooks import DELIVER, deliver_due_events, deliver_event, forget_old

logger = logging.getLogger(__name__)


@shared_task(name="metering.alerts")
def alerts() -> None:
    """Notify tenants of budgets that are nearly spent."""
    if num_sent := send_budget_alerts():
        logger.info("sent %d budget alerts", num_sent)


@shared_task(name=DELIVER)
def deliver_one(pk: int) -> None:
    """Send an event to a webhook."""
    deliver_event(pk)


@shared_task(name="metering.deliveries")
def deliveries() -> None:
    """Queue due webhook events, and trim the delivery log."""
    deliver_due_events()
    forget_old()


@shared_task(name="metering.retention")
def retention() -> None:
    """Delete ledger rows beyond their tenants' retention."""
    if removed := delete_expired_usage():
        logger.info("removed %d entries of the usage ledger", removed)
    if removed := remove_old_requests():
        logger.info("removed %d records of requests", removed)


@shared_task(name="metering.check_sums")
def check_sums() -> None:
    """Verify the sums by hour and day against the ledger, and the ledger against the engine."""
    verify_rollups()
    client = sync_client()
    try:
        result = reconcile(client)
        prune_counters(client, result.lost)
    finally:
        client.close()
    for line in result.lines:
        if any(line.difference):
            logger.error(
                "The ledger of %s, %s has %s tokens (prompt, output) too much.",
                line.tenant,
                line.model,
                line.difference,
            )
    if result.lost:
        logger.error(
            "%d requests were computed and never settled: %s",
            len(result.lost),
            ", ".join(result.lost[:20]),
        )
