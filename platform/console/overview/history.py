"""What happened, for the charts of the overview: JSON for one range, narrowed and in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.http import HttpRequest

from catalog.access import access_served_models
from console.api import json_view
from console.tenancy import first_tenant
from engine.contract.errors import InvalidRequest
from history.read import (
    Wanted,
    grouped,
    known_until,
    percentiles,
    points,
    pools,
    traffic,
)
from history.widths import RANGES, Range
from tenants.access import Reader, access_tenant
from tenants.actors import as_actor
from tenants.errors import NotFound
from tenants.models import Tenant

DEFAULT_RANGE = "30m"
#: What lines can be told apart by -> the column that holds it.
BY = {"model": "model", "tenant": "tenant_id", "adapter": "adapter"}


@json_view
def history(request: HttpRequest) -> dict[str, Any]:
    """`history_of` for the page."""
    return history_of(request.user, request.GET)


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


def scope(request: HttpRequest) -> Tenant | None:
    """The tenant that a page is about; None: all of them, for operators. Raises `NotFound`."""
    user: Any = request.user
    return scope_of(user, request.GET)


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


def range_of(request: HttpRequest) -> Range:
    """Which stretch of time a page is about. Raises `InvalidRequest`."""
    return stretch_of(request.GET)


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
