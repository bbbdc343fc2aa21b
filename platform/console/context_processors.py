"""What the frame around every page shows: the navigation."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest

from console.navigation import navigation

# -- What every page may ask.


def mail(request: HttpRequest) -> dict[str, Any]:
    """`mail_works`: whether a forgotten password can be mailed a new one."""
    return {"mail_works": bool(settings.SMTP_URL)}


def frame(request: HttpRequest) -> dict[str, Any]:
    """Context of every template: `sections` of the navigation, for people who are logged in."""
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return {}
    return {"sections": lambda: navigation(user, request.path)}
