"""Celery's tasks of the wiring."""

from __future__ import annotations

from smtplib import SMTPException
from typing import Any

from celery import shared_task
from celery.exceptions import SoftTimeLimitExceeded

from config.queued_mail import TASK, unpacked

#: Seconds until the first try again; each later one waits twice as long, half an hour at most.
PAUSE_S, LONGEST_PAUSE_S, TRIES = 5, 1800, 12


@shared_task(
    name=TASK,
    bind=True,
    autoretry_for=(SMTPException, OSError, SoftTimeLimitExceeded),
    retry_backoff=PAUSE_S,
    retry_backoff_max=LONGEST_PAUSE_S,
    max_retries=TRIES,
)
def send_mail(task: Any, text: str) -> None:
    """Send a mail; while its server is away, again and again for some hours."""
    unpacked(text).send()
