"""Django mail backend that hands mails to a worker, so that no request waits for their delivery."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import stamina
from django.core.mail import EmailMessage, EmailMultiAlternatives, get_connection
from django.core.mail.backends.base import BaseEmailBackend
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from common.one_time import fernet_for
from common.task_queue import send_task

TASK = "config.send_mail"
SMTP = "django.core.mail.backends.smtp.EmailBackend"
FIELDS = ("subject", "body", "from_email", "to", "cc", "bcc", "reply_to")


class QueuedBackend(BaseEmailBackend):
    """Puts mails into the task queue. Raises OSError if the queue can't be reached."""

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        """Queue messages; return their number."""
        for message in email_messages:
            text = packed(message)
            try:
                # Unlike other work, a mail is in no database: the broker may be restarting.
                for attempt in stamina.retry_context(
                    on=(OperationalError, RedisError), attempts=4, wait_initial=0.5
                ):
                    with attempt:
                        send_task(TASK, text)
            except (OperationalError, RedisError) as error:
                raise OSError(f"The queue of mails can't be reached: {error}") from error
        return len(email_messages)


def packed(message: EmailMessage) -> str:
    """Serialize a mail for a task, encrypted because it may contain a login link.

    Raises: TypeError for attachments, which Quire's mails never have.
    """
    if message.attachments:
        raise TypeError("Mails with attachments can't be queued.")
    values: dict[str, Any] = {name: getattr(message, name) for name in FIELDS}
    values["headers"] = message.extra_headers
    parts = getattr(message, "alternatives", [])
    values["alternatives"] = [[part.content, part.mimetype] for part in parts]
    return fernet_for("mail").encrypt(json.dumps(values).encode()).decode()


def unpacked(text: str) -> EmailMultiAlternatives:
    """Deserialize a task's mail. Raises cryptography's InvalidToken."""
    values = json.loads(fernet_for("mail").decrypt(text.encode()))
    values["alternatives"] = [(content, kind) for content, kind in values["alternatives"]]
    return EmailMultiAlternatives(**values, connection=get_connection(SMTP))
