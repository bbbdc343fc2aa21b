"""allauth's hooks for local accounts."""

from __future__ import annotations

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from django.conf import settings
from django.http import HttpRequest

from tenants import actions
from tenants.models import User


class AccountAdapter(DefaultAccountAdapter):
    """Accounts are made by operators, invitations and single sign-on, never by strangers."""

    error_messages = {
        **DefaultAccountAdapter.error_messages,
        "too_many_login_attempts": "Too many wrong passwords. Wait five minutes, then try again.",
    }

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        """Nobody signs up by themselves."""
        return False

    def get_client_ip(self, request: HttpRequest) -> str:
        """The address that the server saw; it reads a proxy's header where it's told to."""
        return request.META.get("REMOTE_ADDR") or "0.0.0.0"  # noqa: S104 - nobody's address

    def _get_login_attempts_cache_key(self, request: HttpRequest, **credentials: Any) -> str:
        """By name and address, so that nobody locks another person out."""
        name = super()._get_login_attempts_cache_key(request, **credentials)
        return f"{name}@{self.get_client_ip(request)}"

    def set_password(self, user: User, password: str) -> None:
        """Through the actions: sessions end, and the audit log says who did it."""
        saved = actions.set_password(actor=user, user=user, password=password)
        user.password, user.session_epoch = saved.password, saved.session_epoch

    def send_mail(self, template_prefix: str, email: str, context: dict[str, Any]) -> None:
        """Only where mail is set up."""
        if settings.SMTP_URL:
            super().send_mail(template_prefix, email, context)
