"""The registry of all pages, in navigation order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

from django.urls import URLPattern, URLResolver, include, path, reverse
from django.utils.module_loading import import_string

from tenants.access import access_roles
from tenants.models import Role


class Audience(Enum):
    """The users whose navigation shows a page; views check permissions themselves."""

    EVERYBODY = "everybody"
    #: Members of any tenant, and operators.
    MEMBERS = "members"
    #: Admins of any tenant, and operators.
    ADMINS = "admins"
    OWNERS = "owners"
    OPERATORS = "operators"
    STAFF = "staff"


@dataclass(frozen=True)
class NavPage:
    """A page of the navigation.

    Attributes:
        name: URL name of its route.
        address: path below `/` with a trailing slash.
        icon: name in `icons.svg`.
        view: dotted name of the view; "" for pages with `external` routes.
        routes: module with `urlpatterns` below the same address; "" for none.
        external: whether its route is defined elsewhere.
    """

    name: str
    address: str
    title: str
    icon: str
    view: str = ""
    routes: str = ""
    who: Audience = Audience.MEMBERS
    external: bool = False

    @property
    def has_view(self) -> bool:
        return bool(self.view) or self.external


def _page(name: str, address: str, title: str, icon: str, view: str, **options: Any) -> NavPage:
    """Return a page whose view is in `console.views`."""
    return NavPage(name, address, title, icon, f"console.views.{view}", **options)


#: Section title -> pages. Sections are tasks: use the API, see what happened, manage.
NAVIGATION: dict[str, tuple[NavPage, ...]] = {
    "": (
        _page("overview", "console/", "Home", "pulse", "overview.overview", who=Audience.EVERYBODY),
        _page("playground", "", "Playground", "chat", "playground.playground"),
    ),
    "Build": (
        _page("keys", "console/keys/", "API keys", "key", "keys.keys"),
        _page(
            "models",
            "console/models/",
            "Models",
            "cube",
            "models.models",
            routes="console.model_urls",
        ),
        _page("adapters", "console/adapters/", "Adapters", "layers", "adapters.adapters"),
        _page("batches", "console/batches/", "Batches", "stack", "batches.batches"),
        _page("files", "console/files/", "Files", "file", "batches.files"),
        NavPage(
            "reference",
            "reference/",
            "API reference",
            "book",
            who=Audience.EVERYBODY,
            external=True,
        ),
    ),
    "Observe": (
        _page(
            "requests",
            "console/requests/",
            "Requests",
            "list",
            "requests.requests",
            routes="console.request_urls",
        ),
        _page("usage", "console/usage/", "Usage and cost", "chart", "usage.usage"),
        _page(
            "budgets",
            "console/budgets/",
            "Budgets",
            "wallet",
            "billing.budgets",
            who=Audience.ADMINS,
        ),
        _page(
            "fairness",
            "console/fairness/",
            "Fairness",
            "scales",
            "overview.fairness",
            who=Audience.ADMINS,
        ),
        NavPage(
            "kv-map", "console/kv/", "KV map", "grid", "kv_map.views.kv_map", who=Audience.ADMINS
        ),
        _page("nodes", "console/nodes/", "Nodes", "server", "nodes.nodes", who=Audience.OPERATORS),
    ),
    "Manage": (
        _page("members", "console/members/", "Members", "people", "members.members"),
        _page(
            "alerts",
            "console/alerts/",
            "Alerts",
            "warning",
            "alerts.alerts",
            who=Audience.OPERATORS,
        ),
        _page(
            "people",
            "console/people/",
            "People",
            "user",
            "people.people",
            who=Audience.OPERATORS,
        ),
        _page(
            "mcp-servers",
            "console/mcp-servers/",
            "MCP servers",
            "tools",
            "mcp_servers.mcp_servers",
            who=Audience.OPERATORS,
        ),
        _page("tenants", "console/tenants/", "Tenants", "house", "tenants.tenants"),
        _page("prices", "console/prices/", "Prices", "tag", "billing.prices", who=Audience.ADMINS),
        _page(
            "webhook",
            "console/webhook/",
            "Webhooks",
            "bell",
            "settings.webhook",
            who=Audience.ADMINS,
        ),
        _page(
            "audit", "console/audit/", "Audit log", "history", "audit.audit", who=Audience.ADMINS
        ),
        _page("data", "console/data/", "Data", "database", "tenants.data", who=Audience.OWNERS),
        _page(
            "settings",
            "console/settings/",
            "Settings",
            "sliders",
            "settings.settings",
            who=Audience.OPERATORS,
        ),
        NavPage("admin:index", "admin/", "Raw data", "table", who=Audience.STAFF, external=True),
    ),
}


def pages() -> Iterator[NavPage]:
    return chain.from_iterable(NAVIGATION.values())


def routes() -> Iterator[URLPattern | URLResolver]:
    """Routes of the pages, for `console.urls`."""
    for page in pages():
        if page.view:
            yield path(page.address, import_string(page.view), name=page.name)
        if page.routes:
            yield path(page.address, include(page.routes))


def navigation(user: Any, current_path: str) -> list[dict[str, Any]]:
    """The user's navigation; the entry for `current_path` is marked as current.

    Returns: [{"title", "entries": [{"page", "address", "current"}]}].
    """
    audiences = _user_audiences(user)
    sections = [
        (
            title,
            [
                (page, reverse(page.name))
                for page in section
                if page.has_view and page.who in audiences
            ],
        )
        for title, section in NAVIGATION.items()
    ]
    current = _current(current_path, [address for _, entries in sections for _, address in entries])
    return [
        {
            "title": title,
            "entries": [
                {"page": page, "address": address, "current": address == current}
                for page, address in entries
            ],
        }
        for title, entries in sections
        if entries
    ]


def _user_audiences(user: Any) -> set[Audience]:
    rank = max((role.rank for role in access_roles(user)), default=-1)
    membership = {
        Audience.EVERYBODY: True,
        Audience.MEMBERS: rank >= 0 or user.is_superuser,
        Audience.ADMINS: rank >= Role.ADMIN.rank,
        Audience.OWNERS: rank >= Role.OWNER.rank,
        Audience.OPERATORS: user.is_superuser,
        Audience.STAFF: user.is_staff,
    }
    return {audience for audience, is_member in membership.items() if is_member}


def _current(current_path: str, addresses: list[str]) -> str | None:
    """Return the address of the entry for `current_path`: the longest matching prefix, but home and
    playground, whose addresses are prefixes of others, only match exactly.
    """
    if current_path.startswith(f"{reverse('overview')}playground/"):
        return reverse("playground")
    roots = {reverse("playground"), reverse("overview")}
    below = [
        address
        for address in addresses
        if current_path.startswith(address) and address not in roots
    ]
    return current_path if current_path in roots else max(below, key=len, default=None)
