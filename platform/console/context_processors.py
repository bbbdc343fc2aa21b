"""Context of every template: the navigation and its tenant switcher."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import SimpleLazyObject

from common.installation import PROGRAM
from console.navigation import navigation
from console.views.base import MAX_TENANTS
from tenants.access import access_tenants

#: Pages about the installation or all tenants, which don't depend on the current tenant.
INSTALLATION_PAGES = frozenset(
    {"alerts", "mcp-servers", "models", "nodes", "people", "prices", "settings", "tenants"}
)


def frame(request: HttpRequest) -> dict[str, Any]:
    """For logged-in users: `sections` of the navigation, `switcher` between tenants, and the name
    of the `program` that runs commands.
    """
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return {}
    sections = SimpleLazyObject(lambda: navigation(user, request.path))
    return {
        "sections": sections,
        "switcher": SimpleLazyObject(lambda: _switcher(user, sections)),
        "program": PROGRAM,
    }


def _switcher(user: Any, sections: Any) -> dict[str, Any]:
    """The user's tenants, and the page to open for a chosen one: the current page if possible.

    The playground has its own switcher in its toolbar; pages about the installation have none.
    """
    current = [entry for section in sections for entry in section["entries"] if entry["current"]]
    page = current[0]["page"] if current else None
    if page is not None and page.name == "playground":
        return {"tenants": []}
    shows_tenant = page is not None and page.view and page.name not in INSTALLATION_PAGES
    return {
        "tenants": list(access_tenants(user).filter(active=True).order_by("name")[:MAX_TENANTS]),
        "action": current[0]["address"] if shows_tenant else reverse("overview"),
    }
