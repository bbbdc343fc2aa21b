"""Celery's tasks of this app."""

import logging

from celery import shared_task

from console.identity import groups

logger = logging.getLogger(__name__)


@shared_task(name="console.sign_on")
def sign_on() -> None:
    """Look for people who came by single sign-on and are to be asked for again."""
    if due := groups.check_due():
        logger.debug("the identity provider is asked for %d people", due)


@shared_task(name=groups.CHECK, rate_limit="10/s")
def check_user(pk: int) -> None:
    """See whether somebody who came by single sign-on still is in their groups."""
    groups.check_user(pk)
