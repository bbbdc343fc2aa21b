"""Who gets how much of the engines: service by tenant against weight, and what is reserved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from console.api import json_view
from console.overview.history import NoTenant, range_of, scope, scope_of, stretch_of
from console.tenancy import tenant_context
from engine.contract.errors import QuireError
from history.read import Wanted, grouped, known_until, points
from history.widths import RANGES, Range
from tenants.access import Reader
from tenants.actors import as_actor
from tenants.kv_shares import MAX_RESERVED
from tenants.models import Tenant

#: Tenants that the table shows, those with the most service first.
MOST = 100
#: So many others must have had service before a tenant is told of it: one's would be its own.
FEWEST_OTHERS = 2


@dataclass
class Row:
    """One tenant, or all the others together (`tenant` None).

    `service` None: not told; then nobody's share of it is, either.
    """

    name: str
    tenant: Tenant | None
    service: int | None = 0
    service_share: float | None = 0.0
    weight: float = 0.0
    weight_share: float = 0.0


@dataclass
class Service:
    """Computed tokens at each point, by tenant's id."""

    at: list[int]
    by_tenant: dict[int, list[int]]


@require_safe
@never_cache
@login_required
def fairness(request: HttpRequest) -> HttpResponse:
    """Operators see every tenant beside the others, others their own beside all of them."""
    user: Any = request.user
    try:
        tenant, stretch = scope(request), range_of(request)
    except NoTenant:
        context = {**tenant_context(user, None), "none": True}
        return render(request, "console/fairness.html", context)
    except QuireError as error:
        context = {**tenant_context(user, None), "error": error}
        status = error.status if request.GET else 200
        return render(request, "console/fairness.html", context, status=status)
    rows = _rows(_service(stretch), tenant, told=as_actor(user).is_operator)
    active = Tenant.objects.filter(active=True)
    context = {
        **tenant_context(user, tenant),
        "operator": as_actor(user).is_operator and tenant is None,
        "ranges": RANGES.values(),
        "range": stretch,
        "rows": rows[:MOST],
        "more": len(rows) > MOST,
        "most": MOST,
        "served": any(row.service for row in rows),
        "whole": all(row.service is not None for row in rows),
        "reserved": reserved_sum(active),
        "reserved_most": MAX_RESERVED * 100,
        "defaults": settings.QUIRE,
    }
    return render(request, "console/fairness.html", context)


@json_view
def figures(request: HttpRequest) -> dict[str, Any]:
    """`figures_of` for the page."""
    return figures_of(request.user, request.GET)


def figures_of(reader: Reader, asked: Mapping[str, str]) -> dict[str, Any]:
    """The same over time: {"at", "step", "seconds", "tenants": [{"name", "weight", "tokens"}],
    "whole": whether all that had service are there}.
    """
    tenant, stretch = scope_of(reader, asked), stretch_of(asked)
    found = _service(stretch)
    rows = _rows(found, tenant, told=as_actor(reader).is_operator)
    own = {row.tenant.pk for row in rows if row.tenant is not None}
    others = [0] * len(found.at)
    for pk, values in found.by_tenant.items():
        if pk not in own:
            others = [a + b for a, b in zip(others, values, strict=True)]
    nothing = [0] * len(found.at)
    return {
        "at": found.at,
        "step": stretch.step,
        "seconds": [min(stretch.step, max(1, known_until() - start)) for start in found.at],
        "tenants": [
            {
                "name": row.name,
                "weight": row.weight,
                "tokens": others
                if row.tenant is None
                else found.by_tenant.get(row.tenant.pk, nothing),
            }
            for row in rows
            if row.service
        ],
        "whole": all(row.service is not None for row in rows),
    }


def reserved_sum(tenants: Any) -> float:
    """Percent of each KV pool that these reserve together."""
    return 100 * math.fsum(tenants.values_list("kv_reserved_fraction", flat=True))


def _service(stretch: Range) -> Service:
    """Prompt tokens that weren't cached, and tokens of answers: what the scheduler counts."""
    at = points(stretch)
    found = grouped(Wanted(range=stretch), "tenant_id", at)
    by_tenant = {
        pk: [
            max(0, prompt - cached) + out
            for prompt, cached, out in zip(
                line["prompt_tokens"],
                line["cached_tokens"],
                line["completion_tokens"],
                strict=True,
            )
        ]
        for pk, line in found.items()
    }
    return Service(at, by_tenant)


def _rows(found: Service, tenant: Tenant | None, *, told: bool) -> list[Row]:
    """Most service first. For one tenant: its own row, and one of all others without names.

    `told`: of the others' service even where it is a single tenant's.
    """
    totals = {pk: sum(values) for pk, values in found.by_tenant.items()}
    active = list(Tenant.objects.filter(active=True))
    rows = [Row(each.name, each, totals.get(each.pk, 0), weight=each.weight) for each in active]
    if tenant is not None:
        rest = [total for pk, total in totals.items() if pk != tenant.pk and total]
        others = sum(rest) if told or not rest or len(rest) >= FEWEST_OTHERS else None
        weight = math.fsum(row.weight for row in rows if row.tenant != tenant)
        own = [row for row in rows if row.tenant == tenant]
        rows = [*own, Row("All other tenants", None, others, weight=weight)]
    elif left := sum(totals.values()) - sum(row.service or 0 for row in rows):
        rows.append(Row("Others, and tenants that are gone", None, left))
    return _with_shares(rows)


def _with_shares(rows: list[Row]) -> list[Row]:
    """The same in order, with each one's share."""
    whole = all(row.service is not None for row in rows)
    service, weights = sum(row.service or 0 for row in rows), math.fsum(r.weight for r in rows)
    for row in rows:
        row.service_share = None
        if whole:
            row.service_share = 100 * (row.service or 0) / service if service else 0.0
        row.weight_share = 100 * row.weight / weights if weights else 0.0
    return sorted(rows, key=lambda row: (-(row.service or 0), row.tenant is None, row.name))
