"""Queries for charts: traffic history by range, and tenants' service relative to their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.access import access_served_models
from common.errors import NotFound
from engine.contract.errors import InvalidRequest
from history.buckets import RANGES, TimeRange
from history.read import (
    TrafficQuery,
    complete_until,
    group_traffic,
    percentiles,
    pools,
    time_points,
    traffic,
)
from tenants.access import AccessSubject, access_tenant, first_tenant
from tenants.actors import to_actor
from tenants.models import Tenant

DEFAULT_RANGE = "30m"
#: Dimension to group by -> its column.
GROUP_BY = {"model": "model", "tenant": "tenant_id", "adapter": "adapter"}


def get_traffic_history(reader: AccessSubject, params: Mapping[str, str]) -> dict[str, Any]:
    """Return the traffic history for charts.

    Args:
        params: `range` of `RANGES`, `tenant` (operators see all without it), `model`, `adapter`,
            `by`.

    Returns: {"at": start of each point in seconds since the epoch, "step", "seconds": duration of
    each point so far, "sums": {name: [...]}, "first_token" and "gaps": {percentile: [ms or None]},
    "pools": {name: [... or None]}, "groups": [{"name", "requests", "tokens"}]}.
    """
    tenant = resolve_tenant_scope(reader, params)
    stretch = resolve_range(params)
    by = params.get("by", "")
    if by and by not in GROUP_BY:
        raise InvalidRequest(f"by must be one of {', '.join(GROUP_BY)}.", param="by")
    if by == "tenant" and tenant is not None:
        raise NotFound("A tenant sees its own line alone.", param="by")
    model, adapter = params.get("model", ""), params.get("adapter")
    query = TrafficQuery(
        range=stretch,
        tenants=None if tenant is None else [tenant.pk],
        models=[model] if model else None,
        adapter=adapter or None,
    )
    timestamps = time_points(stretch)
    line = traffic(query, timestamps)
    return {
        "range": stretch.name,
        "at": timestamps,
        "step": stretch.step,
        "seconds": [min(stretch.step, max(1, complete_until() - start)) for start in timestamps],
        "sums": line.sums,
        "first_token": percentiles(line.first_token),
        "gaps": percentiles(line.gaps),
        "pools": _pools(query, tenant, timestamps),
        "groups": _groups(query, by, timestamps) if by else [],
    }


class NoTenant(NotFound):
    """The reader belongs to no tenant. Pages show this as information rather than as an error."""

    def __init__(self) -> None:
        super().__init__("You belong to no tenant.")


def resolve_tenant_scope(reader: AccessSubject, params: Mapping[str, str]) -> Tenant | None:
    """Return the tenant that the query names or implies; None, for operators, means all."""
    if named := params.get("tenant"):
        return access_tenant(reader, named)
    if to_actor(reader).is_operator:
        return None
    tenant = first_tenant(reader)
    if tenant is None:
        raise NoTenant
    return tenant


def resolve_range(params: Mapping[str, str]) -> TimeRange:
    """Return the time range that the query names. Raises `InvalidRequest`."""
    name = params.get("range") or DEFAULT_RANGE
    if name not in RANGES:
        raise InvalidRequest(f"range must be one of {', '.join(RANGES)}.", param="range")
    return RANGES[name]


def _pools(query: TrafficQuery, tenant: Tenant | None, timestamps: Sequence[int]) -> dict[str, Any]:
    """KV pools are shared by a model's tenants: a tenant sees those of models available to it, and
    nothing about the cache, whose content includes other tenants' prompts.
    """
    if tenant is None:
        return pools(query, timestamps)
    names = access_served_models(tenant).values_list("name", flat=True)
    models = [name for name in names if query.models is None or name in query.models]
    gauges = pools(TrafficQuery(range=query.range, models=models), timestamps)
    return {name: values for name, values in gauges.items() if name != "cached_blocks"}


def _groups(query: TrafficQuery, by: str, timestamps: Sequence[int]) -> list[dict[str, Any]]:
    groups = group_traffic(query, GROUP_BY[by], timestamps)
    names: dict[Any, str] = {}
    if by == "tenant":
        names = dict(Tenant.objects.filter(pk__in=filter(None, groups)).values_list("pk", "slug"))
    return [
        {
            "name": "others" if group is None else names.get(group, str(group)) or "no adapter",
            "requests": line["requests"],
            "tokens": [
                a + b for a, b in zip(line["prompt_tokens"], line["completion_tokens"], strict=True)
            ],
        }
        for group, line in groups.items()
    ]


#: Maximum number of tenants in the table, those with the most service first.
MAX_ROWS = 100
#: Minimum number of other active tenants whose total a tenant may see: one's would be identifiable.
MIN_OTHER_TENANTS = 2


@dataclass
class Row:
    """Service of a tenant, or of all other tenants together (`tenant` is None).

    `tokens_served`: None if hidden; shares are then hidden in all rows.
    """

    name: str
    tenant: Tenant | None
    tokens_served: int | None = 0
    service_share: float | None = 0.0
    weight: float = 0.0
    weight_share: float = 0.0


@dataclass
class TokenService:
    """Computed tokens at each point, by tenant id."""

    timestamps: list[int]
    by_tenant: dict[int, list[int]]


def get_fairness(reader: AccessSubject, asked: Mapping[str, str]) -> dict[str, Any]:
    """Return tokens over time: {"at", "step", "seconds", "tenants": [{"name", "weight", "tokens"}],
    "whole": whether the rows include all service}.
    """
    tenant, stretch = resolve_tenant_scope(reader, asked), resolve_range(asked)
    service = token_service(stretch)
    rows = fairness_rows(service, tenant, all_tenants=to_actor(reader).is_operator)
    listed_ids = {row.tenant.pk for row in rows if row.tenant is not None}
    other_tokens = [0] * len(service.timestamps)
    for pk, values in service.by_tenant.items():
        if pk not in listed_ids:
            other_tokens = [a + b for a, b in zip(other_tokens, values, strict=True)]
    nothing = [0] * len(service.timestamps)
    return {
        "at": service.timestamps,
        "step": stretch.step,
        "seconds": [
            min(stretch.step, max(1, complete_until() - start)) for start in service.timestamps
        ],
        "tenants": [
            {
                "name": row.name,
                "weight": row.weight,
                "tokens": other_tokens
                if row.tenant is None
                else service.by_tenant.get(row.tenant.pk, nothing),
            }
            for row in rows
            if row.tokens_served
        ],
        "whole": all(row.tokens_served is not None for row in rows),
    }


def reserved_sum(tenants: Any) -> float:
    """Percentage of each KV pool that the tenants reserve together."""
    return 100 * math.fsum(tenants.values_list("kv_reserved_fraction", flat=True))


def token_service(stretch: TimeRange) -> TokenService:
    """Uncached prompt tokens plus output tokens, which is what the scheduler counts."""
    timestamps = time_points(stretch)
    groups = group_traffic(TrafficQuery(range=stretch), "tenant_id", timestamps)
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
        for pk, line in groups.items()
    }
    return TokenService(timestamps, by_tenant)


def fairness_rows(service: TokenService, tenant: Tenant | None, *, all_tenants: bool) -> list[Row]:
    """Rows sorted by service. For one tenant: its row, and a nameless one of all other tenants.

    `all_tenants`: show the others' service even if it is that of a single tenant.
    """
    totals = {pk: sum(values) for pk, values in service.by_tenant.items()}
    active = list(Tenant.objects.filter(active=True))
    rows = [
        Row(other.name, other, totals.get(other.pk, 0), weight=other.weight) for other in active
    ]
    if tenant is not None:
        rest = [total for pk, total in totals.items() if pk != tenant.pk and total]
        other_tokens = (
            sum(rest) if all_tenants or not rest or len(rest) >= MIN_OTHER_TENANTS else None
        )
        weight = math.fsum(row.weight for row in rows if row.tenant != tenant)
        tenant_rows = [row for row in rows if row.tenant == tenant]
        rows = [*tenant_rows, Row("All other tenants", None, other_tokens, weight=weight)]
    elif unlisted := sum(totals.values()) - sum(row.tokens_served or 0 for row in rows):
        rows.append(Row("Others, and tenants that are gone", None, unlisted))
    return _add_shares(rows)


def _add_shares(rows: list[Row]) -> list[Row]:
    """Set the rows' shares and sort them."""
    is_complete = all(row.tokens_served is not None for row in rows)
    service, weights = (
        sum(row.tokens_served or 0 for row in rows),
        math.fsum(r.weight for r in rows),
    )
    for row in rows:
        row.service_share = None
        if is_complete:
            row.service_share = 100 * (row.tokens_served or 0) / service if service else 0.0
        row.weight_share = 100 * row.weight / weights if weights else 0.0
    return sorted(rows, key=lambda row: (-(row.tokens_served or 0), row.tenant is None, row.name))
