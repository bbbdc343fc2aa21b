"""Who gets how much of the engines: service by tenant against weight, and what is reserved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.access import access_served_models
from common.errors import NotFound
from engine.contract.errors import InvalidRequest
from history.buckets import RANGES, Range
from history.read import Wanted, grouped, known_until, percentiles, points, pools, traffic
from tenants.access import Reader, access_tenant, first_tenant
from tenants.actors import as_actor
from tenants.models import Tenant

# -- What happened, for the charts of the overview: JSON for one range, narrowed and in groups.


DEFAULT_RANGE = "30m"
#: What lines can be told apart by -> the column that holds it.
BY = {"model": "model", "tenant": "tenant_id", "adapter": "adapter"}


def history_of(reader: Reader, asked: Mapping[str, str]) -> dict[str, Any]:
    """`range` of `RANGES`, `tenant` (operators: none is all), `model`, `adapter`, `by`.

    Returns: {"at": seconds since 1970 of each point, "step", "seconds": how long each point has
    been, "sums": {name: [...]}, "first_token" and "gaps": {percentile: [ms or None]}, "pools":
    {name: [... or None]}, "groups": [{"name", "requests", "tokens"}]}.
    """
    tenant = scope_of(reader, asked)
    stretch = stretch_of(asked)
    by = asked.get("by", "")
    if by and by not in BY:
        raise InvalidRequest(f"by must be one of {', '.join(BY)}.", param="by")
    if by == "tenant" and tenant is not None:
        raise NotFound("A tenant sees its own line alone.", param="by")
    model, adapter = asked.get("model", ""), asked.get("adapter")
    wanted = Wanted(
        range=stretch,
        tenants=None if tenant is None else [tenant.pk],
        models=[model] if model else None,
        adapter=adapter or None,
    )
    at = points(stretch)
    line = traffic(wanted, at)
    return {
        "range": stretch.name,
        "at": at,
        "step": stretch.step,
        "seconds": [min(stretch.step, max(1, known_until() - start)) for start in at],
        "sums": line.sums,
        "first_token": percentiles(line.first_token),
        "gaps": percentiles(line.gaps),
        "pools": _pools(wanted, tenant, at),
        "groups": _groups(wanted, by, at) if by else [],
    }


class NoTenant(NotFound):
    """The reader belongs to no tenant: a page says so instead of calling it a mistake."""

    def __init__(self) -> None:
        super().__init__("You belong to no tenant.")


def scope_of(reader: Reader, asked: Mapping[str, str]) -> Tenant | None:
    """The same for whoever asks."""
    if named := asked.get("tenant"):
        return access_tenant(reader, named)
    if as_actor(reader).is_operator:
        return None
    tenant = first_tenant(reader)
    if tenant is None:
        raise NoTenant
    return tenant


def stretch_of(asked: Mapping[str, str]) -> Range:
    """The same for whoever asks."""
    name = asked.get("range") or DEFAULT_RANGE
    if name not in RANGES:
        raise InvalidRequest(f"range must be one of {', '.join(RANGES)}.", param="range")
    return RANGES[name]


def _pools(wanted: Wanted, tenant: Tenant | None, at: Sequence[int]) -> dict[str, Any]:
    """Pools are whole models': a tenant sees those of the models that it may use, and of these
    nothing of the cache, which holds what others have asked too.
    """
    if tenant is None:
        return pools(wanted, at)
    own = access_served_models(tenant).values_list("name", flat=True)
    models = [name for name in own if wanted.models is None or name in wanted.models]
    found = pools(Wanted(range=wanted.range, models=models), at)
    return {name: values for name, values in found.items() if name != "cached_blocks"}


def _groups(wanted: Wanted, by: str, at: Sequence[int]) -> list[dict[str, Any]]:
    found = grouped(wanted, BY[by], at)
    names: dict[Any, str] = {}
    if by == "tenant":
        names = dict(Tenant.objects.filter(pk__in=filter(None, found)).values_list("pk", "slug"))
    return [
        {
            "name": "others" if group is None else names.get(group, str(group)) or "no adapter",
            "requests": line["requests"],
            "tokens": [
                a + b for a, b in zip(line["prompt_tokens"], line["completion_tokens"], strict=True)
            ],
        }
        for group, line in found.items()
    ]


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
