"""Celery tasks of accounts."""

from __future__ import annotations

import logging
from smtplib import SMTPException
from typing import Any

from allauth.usersessions.models import UserSession
from celery import shared_task
from celery.exceptions import SoftTimeLimitExceeded
from django.contrib.sessions.models import Session
from django.utils import timezone

from accounts import group_sync
from accounts.mail_backend import TASK, unpacked
from tenants.tenant_data import delete_in_batches

logger = logging.getLogger(__name__)


@shared_task(name="console.sign_on")
def sign_on() -> None:
    """Look for people who came by single sign-on and are to be asked for again."""
    if due := group_sync.check_due_users():
        logger.debug("the identity provider is asked for %d people", due)


@shared_task(name=group_sync.CHECK, rate_limit=f"{group_sync.CHECKS_PER_S}/s")
def check_user(pk: int) -> None:
    """See whether somebody who came by single sign-on still is in their groups."""
    group_sync.check_user(pk)


@shared_task(name="accounts.clear_sessions")
def clear_sessions() -> None:
    """Remove sessions that have expired, and what people are shown of them."""
    expired = Session.objects.filter(expire_date__lt=timezone.now())
    if removed := delete_in_batches(expired):
        logger.info("removed %d expired sessions", removed)
    sessions = Session.objects.values("session_key")
    delete_in_batches(UserSession.objects.exclude(session_key__in=sessions))


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
