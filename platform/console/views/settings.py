"""The page of a tenant's webhook: where it is, a test event, and the log of what was sent."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from accounts.reauthentication import reauthentication_required
from catalog.access import access_catalog
from common.effective_settings import in_force
from console.views.base import deed, post_text, render_page, tenant_context
from engine.contract.errors import QuireError
from metering import actions
from metering.budgets import access_deliveries, access_delivery, access_webhooks
from tenants.access import access_role, first_tenant
from tenants.actors import to_actor
from tenants.models import Role, Tenant

# -- The page of settings in force: each with its value and where that came from. For operators.


@require_safe
@never_cache
@login_required
def settings(request: HttpRequest) -> HttpResponse:
    """All settings of this gateway, and what models set. 403 for all but operators."""
    if not to_actor(request.user).is_operator:
        raise PermissionDenied
    found = in_force()
    models = [
        (model, sorted(model.settings.items())) for model in access_catalog(request.user)[:200]
    ]
    context = {
        "groups": [(title, list(each)) for title, each in groupby(found, lambda one: one.group)],
        "changed": sum(each.source != "default" for each in found),
        "count": len(found),
        "models": models,
    }
    return render(request, "console/settings.html", context)


MAX_ROWS = 100


@require_safe
@never_cache
@login_required
def webhook(request: HttpRequest) -> HttpResponse:
    """For the admins of one of the user's tenants."""
    return render_page(request, show)


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
    if tenant is not None and access_role(user, tenant).rank >= Role.ADMIN.rank:
        context |= {
            "manages": True,
            "webhook": access_webhooks(user, tenant).first(),
            "deliveries": access_deliveries(user, tenant)[:MAX_ROWS],
        }
    return render(request, "console/webhook.html", context, status=error.status if error else 200)


@reauthentication_required
@deed("webhook", show)
def set_webhook(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """Where it is, with a new secret, shown once."""
    url = post_text(request, "url") or ""
    made = actions.set_webhook(actor=request.user, tenant=tenant, url=url)
    return {"secret": made.secret}


@reauthentication_required
@deed("webhook", show)
def delete_webhook(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """Tell nobody any more."""
    actions.delete_webhook(actor=request.user, tenant=tenant)
    return {"text": "No more events are sent."}


@deed("webhook", show)
def try_webhook(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """A test event."""
    actions.send_test_event(actor=request.user, tenant=tenant)
    return {"text": "A test event is being sent. Reload the page in a moment to see the result."}


@deed("webhook", show)
def send_again(request: HttpRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    """An event that was given up."""
    found = access_delivery(request.user, tenant, pk)
    actions.redeliver(actor=request.user, delivery=found)
    return {"text": "The event is being sent again."}
