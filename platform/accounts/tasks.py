"""Celery tasks of accounts."""

from __future__ import annotations

import logging
from smtplib import SMTPException
from typing import Any

from celery import shared_task
from celery.exceptions import SoftTimeLimitExceeded

from accounts import group_sync as groups
from accounts.mail_backend import TASK, unpacked

logger = logging.getLogger(__name__)


@shared_task(name="console.sign_on")
def sign_on() -> None:
    """Look for people who came by single sign-on and are to be asked for again."""
    if due := groups.check_due_users():
        logger.debug("the identity provider is asked for %d people", due)


@shared_task(name=groups.CHECK, rate_limit="10/s")
def check_user(pk: int) -> None:
    """See whether somebody who came by single sign-on still is in their groups."""
    groups.check_user(pk)


#: Seconds until the first try again; each later one waits twice as long, half an hour at most.
RETRY_DELAY_S, MAX_RETRY_DELAY_S, MAX_ATTEMPTS = 5, 1800, 12


@shared_task(
    name=TASK,
    bind=True,
    autoretry_for=(SMTPException, OSError, SoftTimeLimitExceeded),
    retry_backoff=RETRY_DELAY_S,
    retry_backoff_max=MAX_RETRY_DELAY_S,
    max_retries=MAX_ATTEMPTS,
)
def send_mail(task: Any, text: str) -> None:
    """Send a mail; while its server is away, again and again for some hours."""
    unpacked(text).send()
