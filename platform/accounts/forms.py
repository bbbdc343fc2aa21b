"""Codes of authenticator apps: taken a step late or early, and never twice."""

from __future__ import annotations

from typing import Any

from allauth.mfa import app_settings
from allauth.mfa.adapter import get_adapter
from allauth.mfa.base.forms import AuthenticateForm, ReauthenticateForm
from allauth.mfa.models import Authenticator
from django.core.cache import cache


def consume_code(authenticator: Authenticator, code: str) -> None:
    """Raise ValidationError for a code that was used while it may still be accepted.

    allauth forgets used codes after one step, though it accepts them for `TOTP_TOLERANCE` steps
    more on both sides.
    """
    if authenticator.type != Authenticator.Type.TOTP:
        return
    lives = app_settings.TOTP_PERIOD * (2 * app_settings.TOTP_TOLERANCE + 1)
    name = f"second-factor-used:{authenticator.user_id}:{code.strip()}"
    if not cache.add(name, 1, timeout=lives):
        raise get_adapter().validation_error("incorrect_code")


class OneTimeCodeForm(AuthenticateForm):
    """The second step of the login."""

    authenticator: Any

    def clean_code(self) -> str:
        """The code, when it's right and new."""
        code = super().clean_code()
        consume_code(self.authenticator, code)
        return code


class ReauthOneTimeCodeForm(ReauthenticateForm):
    """The proof before something dangerous."""

    authenticator: Any

    def clean_code(self) -> str:
        """The code, when it's right and new."""
        code = super().clean_code()
        consume_code(self.authenticator, code)
        return code
