"""The overview's page."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from adapters.models import Adapter
from catalog.access import access_served_models
from catalog.models import ServedModel
from console.mounting import mounted
from console.overview.history import BY, NoTenant, range_of, scope
from console.tenancy import tenant_context
from engine.contract.errors import QuireError
from history.widths import RANGES
from tenants.actors import as_actor

MOST = 200


@require_safe
@never_cache
@login_required
def overview(request: HttpRequest) -> HttpResponse:
    """Load now, traffic over time, models, replicas, and how to call the API."""
    user: Any = request.user
    operator = as_actor(user).is_operator
    base = {"base_url": request.build_absolute_uri(mounted("/v1")), "operator": operator}
    try:
        tenant, stretch = scope(request), range_of(request)
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
        "ranges": RANGES.values(),
        "range": stretch,
        "models": served.order_by("name").values_list("name", flat=True)[:MOST],
        "adapters": adapters.order_by("name").values_list("name", flat=True).distinct()[:MOST],
        "groups": [name for name in BY if name != "tenant" or tenant is None],
        **{name: request.GET.get(name, "") for name in ("model", "adapter", "by")},
    }
    return render(request, "console/overview.html", context)
