"""Celery's tasks of this app."""

import logging

from celery import shared_task

from console.identity.groups import check_due

logger = logging.getLogger(__name__)


@shared_task(name="console.sign_on", ignore_result=True, acks_late=False)
def sign_on() -> None:
    """See whether people who came by single sign-on still are in their groups."""
    if asked := check_due():
        logger.debug("asked the identity provider for %d people", asked)
