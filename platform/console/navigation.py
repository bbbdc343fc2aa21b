"""Every page of the product, in the order of its navigation: the one place that registers pages.

A line says under which name and address a page is, what it's called, its icon in `icons.svg`, who
sees it, and the view that shows it, by its dotted name. A page without a view isn't built: it has a
name and an address, but neither a route nor an entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from django.urls import URLPattern, URLResolver, include, path, reverse
from django.utils.module_loading import import_string

from tenants.access import access_roles
from tenants.models import Role


class Audience(Enum):
    """Whose navigation has an entry. What a page shows, and to whom, is its view's to say."""

    EVERYBODY = "everybody"
    #: Of some tenant; operators too.
    ADMINS = "admins"
    OWNERS = "owners"
    OPERATORS = "operators"
    STAFF = "staff"


@dataclass(frozen=True)
class NavPage:
    """One page.

    Attributes:
        name: of its route, as `{% url name %}` takes it.
        address: below `/`, with a slash at its end.
        view: where it is, as "package.module.function"; "" while it isn't built.
        routes: a module with `urlpatterns` below the same address; "" for none.
        external: its route is made by somebody else; the entry is ours.
    """

    name: str
    address: str
    title: str
    icon: str
    view: str = ""
    routes: str = ""
    who: Audience = Audience.EVERYBODY
    external: bool = False

    @property
    def has_view(self) -> bool:
        """Whether there is anything to see."""
        return bool(self.view) or self.external


#: Title of a section: its pages.
NAVIGATION: dict[str, tuple[NavPage, ...]] = {
    "": (
        NavPage("playground", "", "Playground", "chat", "console.views.playground.playground"),
        NavPage("overview", "console/", "Overview", "pulse", "console.views.overview.overview"),
    ),
    "Observability": (
        NavPage(
            "requests",
            "console/requests/",
            "Requests",
            "list",
            "console.views.requests.requests",
            routes="console.request_urls",
        ),
        NavPage("kv-map", "console/kv/", "KV map", "grid", "kv_map.views.kv_map"),
        NavPage(
            "fairness",
            "console/fairness/",
            "Fairness",
            "scales",
            "console.views.overview.fairness",
        ),
    ),
    "Serve": (
        NavPage(
            "models",
            "console/models/",
            "Models",
            "cube",
            "console.views.models.models",
            "console.model_urls",
        ),
        NavPage(
            "adapters", "console/adapters/", "Adapters", "layers", "console.views.adapters.adapters"
        ),
        NavPage("batches", "console/batches/", "Batches", "stack", "console.views.batches.batches"),
        NavPage("files", "console/files/", "Files", "file", "console.views.batches.files"),
        NavPage("reference", "reference/", "API reference", "book", external=True),
    ),
    "Money": (
        NavPage("usage", "console/usage/", "Usage and cost", "chart", "console.views.usage.usage"),
        NavPage(
            "budgets", "console/budgets/", "Budgets", "wallet", "console.views.billing.budgets"
        ),
        NavPage("prices", "console/prices/", "Prices", "tag", "console.views.billing.prices"),
    ),
    "Tenant": (
        NavPage("tenants", "console/tenants/", "Tenants", "house", "console.views.tenants.tenants"),
        NavPage(
            "members", "console/members/", "Members", "people", "console.views.members.members"
        ),
        NavPage("keys", "console/keys/", "API keys", "key", "console.views.keys.keys"),
        NavPage(
            "audit",
            "console/audit/",
            "Audit log",
            "history",
            "console.views.audit.audit",
            who=Audience.ADMINS,
        ),
        NavPage(
            "webhook",
            "console/webhook/",
            "Webhooks",
            "bell",
            "console.views.settings.webhook",
            who=Audience.ADMINS,
        ),
        NavPage(
            "data",
            "console/data/",
            "Data",
            "database",
            "console.views.tenants.data",
            who=Audience.OWNERS,
        ),
    ),
    "Installation": (
        NavPage(
            "settings",
            "console/settings/",
            "Settings",
            "sliders",
            "console.views.settings.settings",
            who=Audience.OPERATORS,
        ),
        NavPage("admin:index", "admin/", "Raw data", "table", who=Audience.STAFF, external=True),
    ),
}


def pages() -> Iterator[NavPage]:
    """All of them."""
    for found in NAVIGATION.values():
        yield from found


def routes() -> Iterator[URLPattern | URLResolver]:
    """Routes of the pages that are built, for `console.urls`."""
    for page in pages():
        if page.view:
            yield path(page.address, import_string(page.view), name=page.name)
        if page.routes:
            yield path(page.address, include(page.routes))


def navigation(user: Any, here: str) -> list[dict[str, Any]]:
    """What `user` sees: sections of entries, with the one that `here`, a path, belongs to.

    Returns: [{"title", "entries": [{"page", "address", "current"}]}].
    """
    seen = _user_audiences(user)
    found = [
        (title, [(page, reverse(page.name)) for page in each if page.has_view and page.who in seen])
        for title, each in NAVIGATION.items()
    ]
    current = _current(here, [address for _, each in found for _, address in each])
    return [
        {
            "title": title,
            "entries": [
                {"page": page, "address": address, "current": address == current}
                for page, address in each
            ],
        }
        for title, each in found
        if each
    ]


def _user_audiences(user: Any) -> set[Audience]:
    """Those that the user belongs to."""
    rank = max((role.rank for role in access_roles(user)), default=-1)
    seen = {
        Audience.EVERYBODY: True,
        Audience.ADMINS: rank >= Role.ADMIN.rank,
        Audience.OWNERS: rank >= Role.OWNER.rank,
        Audience.OPERATORS: user.is_superuser,
        Audience.STAFF: user.is_staff,
    }
    return {who for who, sees in seen.items() if sees}


def _current(here: str, addresses: list[str]) -> str | None:
    """The entry for `here`. Every page lies below the first two, so these stand for themselves."""
    roots = {reverse("playground"), reverse("overview")}
    below = [address for address in addresses if here.startswith(address) and address not in roots]
    return here if here in roots else max(below, key=len, default=None)
