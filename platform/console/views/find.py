"""Search for Ctrl-K: models, keys, people, requests, conversations and tenants by name or id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlencode

from django.db.models import Q
from django.urls import reverse

from catalog.access import access_catalog, access_served_models
from console.views.base import current_tenant, json_view
from metering.request_log import access_requests, called
from storage.access import access_conversations
from tenants.access import access_keys, access_members, access_tenants
from tenants.actors import to_actor
from tenants.models import Tenant, User
from tenants.sessions import UserRequest

#: Maximum number of results of one kind.
MAX_RESULTS = 5
MAX_QUERY_CHARS = 200

#: Title, detail and URL.
Match = tuple[str, str, str]


@json_view
def find(request: UserRequest) -> dict[str, Any]:
    """Return objects whose name or id contains `?q=`, at most `MAX_RESULTS` of each kind.

    Keys, people and conversations are limited to the current tenant; models, requests and tenants
    to those that the user may see.

    Returns: {"results": [{"kind", "title", "detail", "url"}]}.
    """
    query = request.GET.get("q", "").replace("\0", "").strip()[:MAX_QUERY_CHARS]
    if not query:
        return {"results": []}
    user, tenant = request.user, current_tenant(request)
    matches: dict[str, Iterable[Match]] = {
        "Model": _models(user, tenant, query),
        "Request": _requests(user, query),
        "Tenant": _tenants(user, query),
    }
    if tenant is not None:
        matches |= {
            "API key": _keys(user, tenant, query),
            "Person": _people(user, tenant, query),
            "Conversation": _conversations(user, tenant, query),
        }
    return {
        "results": [
            {"kind": kind, "title": title, "detail": detail, "url": url}
            for kind, rows in matches.items()
            for title, detail, url in rows
        ]
    }


def _models(user: User, tenant: Tenant | None, query: str) -> Iterator[Match]:
    if to_actor(user).is_operator:
        models = access_catalog(user)
    elif tenant is not None:
        models = access_served_models(tenant)
    else:
        return
    for model in models.filter(name__icontains=query).order_by("name")[:MAX_RESULTS]:
        yield model.name, model.get_desired_state_display(), reverse("model", args=[model.pk])


def _requests(user: User, query: str) -> Iterator[Match]:
    for entry in access_requests(user).filter(called(query))[:MAX_RESULTS]:
        url = reverse("request", args=[entry.request_id])
        yield entry.header_id or entry.request_id, f"{entry.model}, {entry.status}", url


def _tenants(user: User, query: str) -> Iterator[Match]:
    named = Q(name__icontains=query) | Q(slug__icontains=query)
    for tenant in access_tenants(user).filter(named).order_by("name")[:MAX_RESULTS]:
        yield tenant.name, tenant.slug, reverse("tenant", args=[tenant.slug])


def _keys(user: User, tenant: Tenant, query: str) -> Iterator[Match]:
    named = Q(name__icontains=query) | Q(public_id__icontains=query)
    url = _page_of("keys", tenant)
    for key in access_keys(user, tenant).filter(named)[:MAX_RESULTS]:
        yield key.name or key.prefix, key.prefix, url


def _people(user: User, tenant: Tenant, query: str) -> Iterator[Match]:
    named = Q(user__username__icontains=query) | Q(user__email__icontains=query)
    url = _page_of("members", tenant)
    for member in access_members(user, tenant).filter(named)[:MAX_RESULTS]:
        yield member.user.get_username(), member.get_role_display(), url


def _conversations(user: User, tenant: Tenant, query: str) -> Iterator[Match]:
    for row in access_conversations(user, tenant, query)[:MAX_RESULTS]:
        url = f"{reverse('playground')}?{urlencode({'conversation': row.public_id})}"
        yield row.title or "Untitled", tenant.name, url


def _page_of(name: str, tenant: Tenant) -> str:
    return f"{reverse(name)}?{urlencode({'tenant': tenant.slug})}"
