"""Django's mail, handed to a worker: a request is answered before a mail server is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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
    """Puts mails into the queue. Raises OSError when that can't be reached."""

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        """Queue messages; return their number."""
        for message in email_messages:
            try:
                send_task(TASK, packed(message))
            except (OperationalError, RedisError) as error:
                raise OSError(f"The queue of mails can't be reached: {error}") from error
        return len(email_messages)


def packed(message: EmailMessage) -> str:
    """A mail as a task's argument: encrypted, for it may hold a link that lets somebody in.

    Raises: TypeError for attachments, which nothing of ours sends.
    """
    if message.attachments:
        raise TypeError("Mails with attachments can't be queued.")
    values: dict[str, Any] = {name: getattr(message, name) for name in FIELDS}
    values["headers"] = message.extra_headers
    parts = getattr(message, "alternatives", [])
    values["alternatives"] = [[part.content, part.mimetype] for part in parts]
    return fernet_for("mail").encrypt(json.dumps(values).encode()).decode()


def unpacked(text: str) -> EmailMultiAlternatives:
    """The mail of a task's argument. Raises cryptography's InvalidToken."""
    values = json.loads(fernet_for("mail").decrypt(text.encode()))
    values["alternatives"] = [(content, kind) for content, kind in values["alternatives"]]
    return EmailMultiAlternatives(**values, connection=get_connection(SMTP))
