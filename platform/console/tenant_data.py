"""The page of a tenant's data, for its owners: how long it's kept, taking it along, erasing it."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from console.deeds import deed, number_of
from console.identity.recent import recent_authentication_required
from console.streams import download
from console.tenancy import first_tenant, named_tenant, opened, tenant_context
from engine.contract.errors import QuireError
from tenants import actions
from tenants.access import access_role
from tenants.errors import NotFound
from tenants.export import export_chunks
from tenants.holdings import holdings
from tenants.models import Role, Tenant


@require_safe
@never_cache
@login_required
def data(request: HttpRequest) -> HttpResponse:
    """What is kept of one of the user's tenants."""
    return opened(request, show)


def show(
    request: HttpRequest,
    tenant: Tenant | None,
    *,
    told: dict[str, Any] | None = None,
    error: QuireError | None = None,
) -> HttpResponse:
    """The page, with what was just done or refused."""
    user: Any = request.user
    tenant = tenant or first_tenant(user)
    context: dict[str, Any] = {**tenant_context(user, tenant), "told": told, "error": error}
    if tenant is not None and access_role(user, tenant) == Role.OWNER:
        kinds = [each.name.replace("-", " ") for each in holdings() if each.rows]
        context |= {"owns": True, "kinds": kinds}
    return render(
        request, "console/tenant_data.html", context, status=error.status if error else 200
    )


@recent_authentication_required
@deed("data", show)
def keep(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """How many days content is kept, and whether the playground's conversations are."""
    days, talks = number_of(request, "days"), request.POST.get("conversations") == "yes"
    actions.update_tenant(
        actor=request.user, tenant=tenant, keep_content_days=days, keep_conversations=talks
    )
    if days is None:
        return {"text": "Each item is kept for its own lifetime."}
    return {"text": f"Content is kept for {days} days; workers delete older content."}


@recent_authentication_required
@require_POST
@never_cache
@login_required
def export(request: HttpRequest) -> HttpResponseBase:
    """All of it as a ZIP archive."""
    tenant = None
    try:
        tenant = _named(request)
        actions.begin_export(actor=request.user, tenant=tenant)
    except QuireError as error:
        return show(request, tenant, error=error)
    return download(request, export_chunks(tenant), f"{tenant.slug}.zip", "application/zip")


@recent_authentication_required
@require_POST
@never_cache
@login_required
def erase(request: HttpRequest) -> HttpResponse:
    """For good. Sessions of its members end, so the way leads to the login."""
    tenant = None
    try:
        tenant = _named(request)
        confirm = request.POST.get("confirm", "")
        actions.erase_tenant(actor=request.user, tenant=tenant, confirm=confirm)
    except QuireError as error:
        return show(request, tenant, error=error)
    return redirect("login")


def _named(request: HttpRequest) -> Tenant:
    """Raises `NotFound`."""
    tenant = named_tenant(request)
    if tenant is None:
        raise NotFound("You belong to no tenant.")
    return tenant
