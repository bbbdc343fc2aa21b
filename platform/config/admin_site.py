"""The admin's site: what operators come for first, first."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

#: Apps in the order of the index and the sidebar; others follow.
ORDER = ("tenants", "catalog", "metering", "storage")
NAMES = {"axes": "Log-ins", "auth": "Groups of staff"}


class QuireAdminSite(admin.AdminSite):
    """Django's, with our apps before those that we only use."""

    site_title = "Quire"
    site_header = "Quire"
    index_title = "Installation"

    def get_app_list(
        self, request: HttpRequest, app_label: str | None = None
    ) -> list[dict[str, Any]]:
        """The apps that the user may see, in our order and under names that say what they hold."""
        found = super().get_app_list(request, app_label)
        for app in found:
            app["name"] = NAMES.get(app["app_label"], app["name"])
        return sorted(found, key=lambda app: _place(app["app_label"]))


def _place(label: str) -> int:
    return ORDER.index(label) if label in ORDER else len(ORDER)
