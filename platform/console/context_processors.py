"""Context of every template: navigation and mail settings."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest

from console.navigation import navigation


def mail(request: HttpRequest) -> dict[str, Any]:
    """`mail_works`: whether mail is configured, as password resets require."""
    return {"mail_works": bool(settings.QUIRE.smtp_url)}


def frame(request: HttpRequest) -> dict[str, Any]:
    """`sections` of the navigation, for logged-in users."""
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return {}
    return {"sections": lambda: navigation(user, request.path)}
