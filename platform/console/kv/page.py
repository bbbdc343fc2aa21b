"""The page of the KV map."""

from __future__ import annotations

from typing import Any

import redis
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from console.isolation import generates, may_prove
from console.kv.access import access_watched
from console.mounting import mounted
from console.tenancy import named_tenant, tenant_context
from engine.contract.errors import QuireError
from tenants.actors import as_actor

SOCKET_PATH = "/ws/kv/"


@require_safe
@never_cache
@login_required
def kv_map(request: HttpRequest) -> HttpResponse:
    """Every block of a replica; its frames come over a socket."""
    user: Any = request.user
    operator = as_actor(user).is_operator
    context: dict[str, Any] = {"operator": operator, "socket_path": mounted(SOCKET_PATH)}
    error: QuireError | None = None
    tenant = None
    try:
        tenant = named_tenant(request)
    except QuireError as refusal:
        error = refusal
    try:
        watched = access_watched(user)
    except redis.RedisError:
        watched, context["away"] = [], True
    named = request.GET.get("replica")
    ids = [beat.replica_id for beat in watched]
    context |= {
        **tenant_context(user, tenant),
        "replicas": [{"id": beat.replica_id, "model": beat.model.name} for beat in watched],
        "replica": named if named in ids else (ids[0] if ids else ""),
        "seen_as": "" if operator and request.GET.get("own") != "yes" else tenant and tenant.slug,
        "models": sorted({beat.model.name for beat in watched if generates(beat)}),
        "proves": may_prove(user, tenant),
        "error": error,
    }
    return render(request, "console/kv_map.html", context, status=error.status if error else 200)
