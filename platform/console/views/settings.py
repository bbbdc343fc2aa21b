"""The pages of the settings in effect and of a tenant's webhook."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.shortcuts import render

from catalog.access import access_catalog
from common.effective_settings import in_force
from console.views.base import TenantPage, page_view, post_text
from metering import actions
from metering.budgets import access_deliveries, access_delivery, access_webhooks
from tenants.access import access_role
from tenants.actors import to_actor
from tenants.models import Role, Tenant
from tenants.sessions import UserRequest


@page_view
def settings(request: UserRequest) -> HttpResponse:
    """Settings in effect on this gateway and for each model, with sources. Operators only."""
    if not to_actor(request.user).is_operator:
        raise PermissionDenied
    settings = in_force()
    models = [
        (model, sorted(model.settings.items())) for model in access_catalog(request.user)[:200]
    ]
    context = {
        "groups": [
            (title, list(group))
            for title, group in groupby(settings, lambda setting: setting.group)
        ],
        "changed": sum(setting.source != "default" for setting in settings),
        "count": len(settings),
        "models": models,
    }
    return render(request, "console/settings.html", context)


MAX_ROWS = 100


def _webhook_context(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    user = request.user
    if access_role(user, tenant).rank < Role.ADMIN.rank:
        return {}
    return {
        "manages": True,
        "webhook": access_webhooks(user, tenant).first(),
        "deliveries": access_deliveries(user, tenant)[:MAX_ROWS],
    }


#: A tenant's webhook and its deliveries. Admins only.
webhook = TenantPage("webhook", "webhook", _webhook_context)


@webhook.action
def set_webhook(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    """Set the webhook's URL and create a new secret, shown once."""
    url = post_text(request, "url") or ""
    return {"secret": actions.set_webhook(actor=request.user, tenant=tenant, url=url).secret}


@webhook.action
def delete_webhook(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    actions.delete_webhook(actor=request.user, tenant=tenant)
    return {"text": "No more events are sent."}


@webhook.action
def try_webhook(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    """Send a test event."""
    actions.send_test_event(actor=request.user, tenant=tenant)
    return {"text": "A test event is being sent. Reload the page in a moment to see the result."}


@webhook.action
def send_again(request: UserRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    """Retry an abandoned event."""
    delivery = access_delivery(request.user, tenant, pk)
    actions.redeliver(actor=request.user, delivery=delivery)
    return {"text": "The event is being sent again."}
