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


class Who(Enum):
    """Whose navigation has an entry. What a page shows, and to whom, is its view's to say."""

    EVERYBODY = "everybody"
    #: Of some tenant; operators too.
    ADMINS = "admins"
    OWNERS = "owners"
    OPERATORS = "operators"
    STAFF = "staff"


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        name: of its route, as `{% url name %}` takes it.
        address: below `/`, with a slash at its end.
        view: where it is, as "package.module.function"; "" while it isn't built.
        routes: a module with `urlpatterns` below the same address; "" for none.
        elsewhere: its route is made by somebody else; the entry is ours.
    """

    name: str
    address: str
    title: str
    icon: str
    view: str = ""
    routes: str = ""
    who: Who = Who.EVERYBODY
    elsewhere: bool = False

    @property
    def built(self) -> bool:
        """Whether there is anything to see."""
        return bool(self.view) or self.elsewhere


#: Title of a section: its pages.
SECTIONS: dict[str, tuple[Page, ...]] = {
    "": (
        Page("playground", "", "Playground", "chat", "console.views.playground.playground"),
        Page("overview", "console/", "Overview", "pulse", "console.views.overview.overview"),
    ),
    "Observability": (
        Page(
            "requests",
            "console/requests/",
            "Requests",
            "list",
            "console.views.requests.requests",
            routes="console.request_urls",
        ),
        Page("kv-map", "console/kv/", "KV map", "grid", "kv_map.views.kv_map"),
        Page(
            "fairness",
            "console/fairness/",
            "Fairness",
            "scales",
            "console.views.overview.fairness",
        ),
    ),
    "Serve": (
        Page(
            "models",
            "console/models/",
            "Models",
            "cube",
            "console.views.models.models",
            "console.model_urls",
        ),
        Page(
            "adapters", "console/adapters/", "Adapters", "layers", "console.views.adapters.adapters"
        ),
        Page("batches", "console/batches/", "Batches", "stack", "console.views.batches.batches"),
        Page("files", "console/files/", "Files", "file", "console.views.batches.files"),
        Page("reference", "reference/", "API reference", "book", elsewhere=True),
    ),
    "Money": (
        Page("usage", "console/usage/", "Usage and cost", "chart", "console.views.usage.usage"),
        Page("budgets", "console/budgets/", "Budgets", "wallet", "console.views.billing.budgets"),
        Page("prices", "console/prices/", "Prices", "tag", "console.views.billing.prices"),
    ),
    "Tenant": (
        Page("tenants", "console/tenants/", "Tenants", "house", "console.views.tenants.tenants"),
        Page("members", "console/members/", "Members", "people", "console.views.members.members"),
        Page("keys", "console/keys/", "API keys", "key", "console.views.keys.keys"),
        Page(
            "audit",
            "console/audit/",
            "Audit log",
            "history",
            "console.views.audit.audit",
            who=Who.ADMINS,
        ),
        Page(
            "webhook",
            "console/webhook/",
            "Webhooks",
            "bell",
            "console.views.settings.webhook",
            who=Who.ADMINS,
        ),
        Page(
            "data",
            "console/data/",
            "Data",
            "database",
            "console.views.tenants.data",
            who=Who.OWNERS,
        ),
    ),
    "Installation": (
        Page(
            "settings",
            "console/settings/",
            "Settings",
            "sliders",
            "console.views.settings.settings",
            who=Who.OPERATORS,
        ),
        Page("admin:index", "admin/", "Raw data", "table", who=Who.STAFF, elsewhere=True),
    ),
}


def pages() -> Iterator[Page]:
    """All of them."""
    for found in SECTIONS.values():
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
    seen = _audiences(user)
    found = [
        (title, [(page, reverse(page.name)) for page in each if page.built and page.who in seen])
        for title, each in SECTIONS.items()
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


def _audiences(user: Any) -> set[Who]:
    """Those that the user belongs to."""
    rank = max((role.rank for role in access_roles(user)), default=-1)
    seen = {
        Who.EVERYBODY: True,
        Who.ADMINS: rank >= Role.ADMIN.rank,
        Who.OWNERS: rank >= Role.OWNER.rank,
        Who.OPERATORS: user.is_superuser,
        Who.STAFF: user.is_staff,
    }
    return {who for who, sees in seen.items() if sees}


def _current(here: str, addresses: list[str]) -> str | None:
    """The entry for `here`. Every page lies below the first two, so these stand for themselves."""
    roots = {reverse("playground"), reverse("overview")}
    below = [address for address in addresses if here.startswith(address) and address not in roots]
    return here if here in roots else max(below, key=len, default=None)
