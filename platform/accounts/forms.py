"""One-time codes of authenticator apps: accepted one step early or late, and only once."""

from __future__ import annotations

from typing import Any

from allauth.mfa import app_settings
from allauth.mfa.adapter import get_adapter
from allauth.mfa.base.forms import AuthenticateForm, ReauthenticateForm
from allauth.mfa.models import Authenticator
from django.core.cache import cache


def consume_code(authenticator: Authenticator, code: str) -> None:
    """Raise ValidationError for a code that was already used.

    allauth remembers a used code for one step only, although it accepts codes for `TOTP_TOLERANCE`
    more steps on both sides.
    """
    if authenticator.type != Authenticator.Type.TOTP:
        return
    lives = app_settings.TOTP_PERIOD * (2 * app_settings.TOTP_TOLERANCE + 1)
    name = f"second-factor-used:{authenticator.user_id}:{code.strip()}"
    if not cache.add(name, 1, timeout=lives):
        raise get_adapter().validation_error("incorrect_code")


class OneTimeCodeForm(AuthenticateForm):
    """The second step of a login."""

    authenticator: Any

    def clean_code(self) -> str:
        """Return the code if it's valid and unused."""
        code = super().clean_code()
        consume_code(self.authenticator, code)
        return code


class ReauthOneTimeCodeForm(ReauthenticateForm):
    """Confirms the user's identity before a sensitive action."""

    authenticator: Any

    def clean_code(self) -> str:
        """Return the code if it's valid and unused."""
        code = super().clean_code()
        consume_code(self.authenticator, code)
        return code
