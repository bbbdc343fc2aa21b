"""Celery tasks of this app."""

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
    """Queue the group checks of single sign-on users that are due."""
    if due := group_sync.check_due_users():
        logger.debug("the identity provider is asked for %d people", due)


@shared_task(name=group_sync.CHECK, rate_limit=f"{group_sync.CHECKS_PER_S}/s")
def check_user(pk: int) -> None:
    """Check whether a single sign-on user still belongs to their groups."""
    group_sync.check_user(pk)


@shared_task(name="accounts.clear_sessions")
def clear_sessions() -> None:
    """Remove expired sessions and their entries in users' session lists."""
    expired = Session.objects.filter(expire_date__lt=timezone.now())
    if removed := delete_in_batches(expired):
        logger.info("removed %d expired sessions", removed)
    sessions = Session.objects.values("session_key")
    delete_in_batches(UserSession.objects.exclude(session_key__in=sessions))


#: Delay before the first retry in seconds; it doubles up to the maximum.
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
    """Send a mail; retry for some hours while the mail server can't be reached."""
    unpacked(text).send()
