"""The overview and fairness pages, and the JSON behind them in the API's error envelope."""

from __future__ import annotations

from typing import Any

from asgiref.sync import async_to_sync
from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render

from adapters.cards import access_models
from adapters.models import Adapter
from catalog.access import access_served_models
from catalog.live_status import live_replicas, overview_of, states_of
from catalog.mcp_servers import mcp_servers_of
from catalog.models import Replica, ServedModel
from common.errors import PermissionDenied
from console.mounting import mounted
from console.views.base import json_view, page_view, scope_query, tenant_context
from console.views.home import home_context
from engine.contract.errors import QuireError
from engine.contract.pooling_params import GENERATE, TRANSCRIPTION
from history.buckets import RANGES
from history.queries import (
    GROUP_BY,
    MAX_ROWS,
    NoTenant,
    fairness_rows,
    get_fairness,
    get_traffic_history,
    reserved_sum,
    resolve_range,
    resolve_tenant_scope,
    token_service,
)
from metering.recent_usage import recent_usage
from tenants.access import access_tenants
from tenants.actions.tenants import MAX_RESERVED_FRACTION
from tenants.actors import to_actor
from tenants.api_keys import INFERENCE
from tenants.authentication import caller_for_user
from tenants.models import Tenant
from tenants.sessions import UserRequest

#: Playground tab -> tasks, of which a model must support one. Other tabs need generation.
TASKS_OF_TAB = {
    "embeddings": {"embed"},
    "rerank": {"embed", "score"},
    "speech": {TRANSCRIPTION},
}
#: Maximum number of tenants in a picker.
MAX_TENANTS = 500


@json_view
def models(request: UserRequest) -> dict[str, Any]:
    """Models, adapters and MCP servers that the user may use in the playground, with their states.

    `?tenant=` selects one of the user's tenants (default: the first they joined); the response
    names it and all others. `?tab=` selects the models of another tab, see `TASKS_OF_TAB`.
    """
    tasks = TASKS_OF_TAB.get(request.GET.get("tab", ""), {GENERATE})
    active = access_tenants(request.user).filter(active=True).order_by("name", "pk")
    tenants = [{"id": row.slug, "name": row.name} for row in active[:MAX_TENANTS]]
    named = request.GET.get("tenant", "")
    tenant = named if named in {row["id"] for row in tenants} else None
    try:
        caller = async_to_sync(caller_for_user)(request.user, tenant)
    except PermissionDenied:
        return {
            "models": [],
            "mcp_servers": [],
            "tenant": None,
            "tenants": [],
            "view_only": False,
        }
    cards = async_to_sync(access_models)(caller)
    names = {card.parent or card.id for card in cards}
    rows = Replica.objects.filter(served_model__name__in=names).select_related("served_model")
    states = states_of(names, live_replicas(), rows)
    available = [
        {
            "id": card.id,
            "parent": card.parent,
            **state,
            "max_model_len": card.max_model_len or state["context"],
        }
        for card in cards
        for state in [states[card.parent or card.id]]
        if tasks.intersection(state["tasks"] or [GENERATE])
        # Transcription models generate tokens too, but can't chat.
        and (TRANSCRIPTION in tasks or TRANSCRIPTION not in (state["tasks"] or ()))
    ]
    servers = mcp_servers_of(caller.tenant_id)
    return {
        "models": available,
        "mcp_servers": [
            {"name": server.name, "tools": [tool["function"] for tool in server.tools]}
            for server in servers
        ],
        "tenant": caller.tenant,
        "tenants": tenants,
        "view_only": INFERENCE not in caller.scopes,
    }


@json_view
def overview_json(request: UserRequest) -> dict[str, Any]:
    """Models available to the user's tenants, or to `?tenant=`, and their replicas."""
    return overview_of(request.user, request.GET.get("tenant"))


@json_view
def usage(request: UserRequest) -> dict[str, Any]:
    """Recent usage by tenant and model."""
    return recent_usage(request.user)


@json_view
def history(request: UserRequest) -> dict[str, Any]:
    """Traffic history for the overview page."""
    return get_traffic_history(request.user, request.GET)


@page_view
def fairness(request: UserRequest) -> HttpResponse:
    """Service by tenant: operators see all tenants, members theirs against the rest together."""
    user = request.user
    try:
        tenant = resolve_tenant_scope(user, scope_query(request))
        time_range = resolve_range(request.GET)
    except NoTenant:
        context = {**tenant_context(user, None), "none": True}
        return render(request, "console/fairness.html", context)
    except QuireError as error:
        context = {**tenant_context(user, None), "error": error}
        status = error.status if request.GET else 200
        return render(request, "console/fairness.html", context, status=status)
    rows = fairness_rows(token_service(time_range), tenant, all_tenants=to_actor(user).is_operator)
    context = {
        **tenant_context(user, tenant),
        "operator": to_actor(user).is_operator and tenant is None,
        "ranges": RANGES.values(),
        "range": time_range,
        "rows": rows[:MAX_ROWS],
        "more": len(rows) > MAX_ROWS,
        "most": MAX_ROWS,
        "served": any(row.tokens_served for row in rows),
        "whole": all(row.tokens_served is not None for row in rows),
        "reserved": reserved_sum(Tenant.objects.filter(active=True)),
        "reserved_most": MAX_RESERVED_FRACTION * 100,
        "defaults": settings.QUIRE,
    }
    return render(request, "console/fairness.html", context)


@json_view
def figures(request: UserRequest) -> dict[str, Any]:
    """Fairness figures for the page."""
    return get_fairness(request.user, request.GET)


MAX_NAMES = 200


@page_view
def overview(request: UserRequest) -> HttpResponse:
    """The overview page: current load, traffic, models, replicas and how to call the API."""
    user = request.user
    operator = to_actor(user).is_operator
    base = {"base_url": request.build_absolute_uri(mounted("/v1")), "operator": operator}
    try:
        tenant = resolve_tenant_scope(user, scope_query(request))
        time_range = resolve_range(request.GET)
    except NoTenant:
        context = {**base, **tenant_context(user, None), "none": True}
        return render(request, "console/overview.html", context)
    except QuireError as error:
        context = {**base, **tenant_context(user, None), "error": error}
        return render(request, "console/overview.html", context, status=error.status)
    served = ServedModel.objects.all() if tenant is None else access_served_models(tenant)
    adapters = Adapter.objects.all() if tenant is None else Adapter.objects.filter(tenant=tenant)
    context = {
        **base,
        **tenant_context(user, tenant),
        **home_context(user, tenant),
        "ranges": RANGES.values(),
        "range": time_range,
        "models": served.order_by("name").values_list("name", flat=True)[:MAX_NAMES],
        "adapters": adapters.order_by("name").values_list("name", flat=True).distinct()[:MAX_NAMES],
        "groups": [name for name in GROUP_BY if name != "tenant" or tenant is None],
        **{name: request.GET.get(name, "") for name in ("model", "adapter", "by")},
    }
    return render(request, "console/overview.html", context)
