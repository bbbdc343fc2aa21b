"""Which of the user's tenants a page is about."""

from __future__ import annotations

from typing import Any, Protocol
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from engine.contract.errors import QuireError
from tenants.access import Reader, access_tenant, access_tenants
from tenants.models import Tenant, User
from tenants.shown_once import keep, take

MOST_TENANTS = 500
#: Of the session: the tenant that was looked at last. Other pages open with it.
LOOKED_AT = "tenant"


class Show(Protocol):
    """Renders a page about a tenant, None for one that can't be shown."""

    def __call__(
        self,
        request: HttpRequest,
        tenant: Tenant | None,
        *,
        told: dict[str, Any] | None = None,
        error: QuireError | None = None,
    ) -> HttpResponse: ...


def named_tenant(request: HttpRequest) -> Tenant | None:
    """The tenant that is named, else the one looked at last, else the user's first.

    Raises `NotFound` for a stranger's.
    """
    user: Any = request.user
    named = request.POST.get("tenant") or request.GET.get("tenant")
    last = request.session.get(LOOKED_AT)
    if not named:
        kept = access_tenants(user).filter(active=True, slug=last).first() if last else None
        return kept or first_tenant(user)
    tenant = access_tenant(user, named)
    if last != tenant.slug:
        request.session[LOOKED_AT] = tenant.slug
    return tenant


def first_tenant(user: Reader) -> Tenant | None:
    """The oldest active one that the user may see, or None."""
    return access_tenants(user).filter(active=True).order_by("pk").first()


def tenant_context(user: User, tenant: Tenant | None) -> dict[str, Any]:
    """For the choice of a tenant at the top of a page."""
    found = access_tenants(user).filter(active=True).order_by("name")
    shown = list(found[:MOST_TENANTS])
    return {"tenant": tenant, "tenants": shown, "more_tenants": len(shown) > 1}


def opened(request: HttpRequest, show: Show) -> HttpResponse:
    """The page of the tenant that is named, with what the last POST there kept to be told once."""
    try:
        tenant = named_tenant(request)
    except QuireError as error:
        return show(request, None, error=error)
    kept = take(request) if request.method == "GET" and tenant is not None else {}
    told = kept if tenant is not None and kept.get("tenant") == tenant.slug else {}
    return show(request, tenant, told=told)


def done(request: HttpRequest, page: str, tenant: Tenant, **kept: Any) -> HttpResponse:
    """On to the page: whoever reloads that does nothing twice. It tells what was kept, once."""
    keep(request, tenant=tenant.slug, **kept)
    return redirect(f"{reverse(page)}?{urlencode({'tenant': tenant.slug})}")
