"""Mails of invitations."""

from __future__ import annotations

import logging
from smtplib import SMTPException

from django.conf import settings
from django.core.mail import send_mail

from tenants.models import Invitation

logger = logging.getLogger(__name__)


def mail_invitation(invitation: Invitation, link: str) -> bool:
    """Mail a link; return False if mail is disabled or its server can't be reached."""
    if not settings.QUIRE.smtp_url:
        return False
    inviter = invitation.created_by
    who = inviter.get_username() if inviter else "An operator"
    text = (
        f"{who} invites you to {invitation.tenant.name} on Quire, as {invitation.role}.\n\n"
        f"Follow this link until {invitation.expires_at:%Y-%m-%d %H:%M} UTC; it works once:\n"
        f"{link}\n"
    )
    subject = f"An invitation to {' '.join(invitation.tenant.name.split())}"
    try:
        send_mail(subject, text, None, [invitation.email])
    except (SMTPException, OSError) as error:
        logger.warning("an invitation was not mailed: %s", error)
        return False
    return True
