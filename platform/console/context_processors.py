"""Context of every template: the navigation."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from console.navigation import navigation


def frame(request: HttpRequest) -> dict[str, Any]:
    """`sections` of the navigation, for logged-in users."""
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return {}
    return {"sections": lambda: navigation(user, request.path)}
