"""The pages of LoRA adapters: versions, aliases and residency.

They work without scripts except for uploads; each POST responds with a redirect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from operator import attrgetter
from typing import Any
from urllib.parse import urlencode

import redis
from django.db.models import Prefetch, QuerySet
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse

from adapters import access, actions
from adapters.access import DAYS, access_request, usage_of
from adapters.models import PASSED, WORKING, Adapter, AdapterAlias, VersionState
from adapters.store import max_tenant_adapter_bytes, used_bytes
from catalog.access import access_served_models
from catalog.live_status import live_replicas, residency
from common.errors import NotFound
from common.one_time import pop_one_time, store_one_time
from console.mounting import mounted
from console.views.base import (
    change_view,
    current_tenant,
    json_view,
    page_view,
    require_tenant,
    tenant_context,
)
from engine.contract.errors import InvalidRequest, QuireError
from metering.models import UsageEntry
from tenants.access import access_role, first_tenant
from tenants.actors import to_actor
from tenants.models import Role, Tenant, User
from tenants.sessions import UserRequest

#: Maximum number of rows on the page.
MAX_ROWS = 200
Action = Callable[..., str]


@page_view
def adapters(request: UserRequest) -> HttpResponse:
    """List the adapters of one of the user's tenants, and those shared with it."""
    try:
        return _list(request, current_tenant(request))
    except QuireError as error:
        return _list(request, first_tenant(request.user), error=error)


@page_view
def adapter(request: UserRequest, pk: int) -> HttpResponse:
    """Show one adapter: traffic, versions, residency and usage."""
    try:
        tenant = current_tenant(request)
        if tenant is None:
            raise NotFound("Adapter not found.")
        return _one(request, tenant, pk)
    except QuireError as error:
        return _list(request, first_tenant(request.user), error=error)


@json_view
def adapter_status_json(request: UserRequest) -> dict[str, Any]:
    """States and residency of a tenant's adapters, polled by an open page."""
    tenant = current_tenant(request)
    if tenant is None:
        return {"adapters": []}
    rows = _rows(request.user, tenant)
    operator = to_actor(request.user).is_operator
    locations = _residency(rows, operator=operator)
    return {"adapters": [_figures(row, locations) for row in rows]}


def residency_topic(tenant_id: int) -> dict[str, Any]:
    """Data of the topic `adapters`: states and residency, without details for operators only. Pages
    fetch what their user may see.
    """
    tenant = Tenant.objects.get(pk=tenant_id)
    rows = list(_prefetch(access.adapters_of(tenant))[:MAX_ROWS])
    locations = _residency(rows, operator=False)
    return {"adapters": [_figures(row, locations) for row in rows]}


def post_action(function: Action) -> Callable[..., HttpResponseBase]:
    """Turn an action on an adapter into a POST view that redirects to its page."""

    @change_view
    @wraps(function)
    def view(request: UserRequest, **kwargs: Any) -> HttpResponse:
        user = request.user
        tenant = None
        try:
            tenant = require_tenant(request)
            if "pk" in kwargs:
                kwargs["adapter"] = access.access_adapter(user, tenant, kwargs.pop("pk"))
            text = function(request, tenant, **kwargs)
        except QuireError as error:
            adapter = kwargs.get("adapter")
            if tenant is not None and adapter is not None:
                return _one(request, tenant, adapter.pk, error=error)
            return _list(request, tenant or first_tenant(user), error=error)
        store_one_time(request, tenant=tenant.slug, text=text)
        adapter, page = kwargs.get("adapter"), reverse("adapters")
        if adapter is not None and Adapter.objects.filter(pk=adapter.pk).exists():
            page = reverse("adapter", args=[adapter.pk])
        return redirect(f"{page}?{urlencode({'tenant': tenant.slug})}")

    return view


@post_action
def fetch(request: UserRequest, tenant: Tenant) -> str:
    """Add a version from the hub, or for operators from a folder on the server."""
    form = request.POST
    model = access_served_models(tenant).filter(name=form.get("model", "")).first()
    if model is None:
        raise NotFound("Choose one of the models.", param="model")
    common: dict[str, Any] = {
        "actor": request.user,
        "tenant": None if form.get("shared") else tenant,
        "served_model": model,
        "name": form.get("name", "").strip(),
        "promote": bool(form.get("promote")),
    }
    source = form.get("source", "").strip()
    if source.startswith(("/", ".", "~")):
        version = actions.add_from_folder(path=source, **common)
    else:
        version = actions.add_from_hub(repository=source, **common)
    return f"{version} will be checked by a worker soon."


@post_action
def promote(request: UserRequest, tenant: Tenant, adapter: Adapter) -> str:
    """Route all requests of an alias, or a share of them, to a version."""
    number, percent = post_int(request, "version"), post_int(request, "percent", 100)
    version = access.access_version(request.user, adapter, number)
    alias = request.POST.get("new_alias", "").strip() or request.POST.get("alias", "")
    updated = actions.promote(actor=request.user, version=version, alias=alias, percent=percent)
    if updated.canary is not None:
        return f"{updated.name}: version {number} now gets {percent} % of the requests."
    return f"{updated.name}: version {number} is live. Running requests keep their version."


@post_action
def rollback(request: UserRequest, tenant: Tenant, adapter: Adapter) -> str:
    """End a canary, or roll back to the previous version."""
    name = request.POST.get("alias", "")
    alias = access.access_alias(request.user, adapter, name)
    updated = actions.rollback(actor=request.user, alias=alias)
    number = updated.version.number if updated.version is not None else "nothing"
    return f"{updated.name}: version {number} answers all requests again."


@post_action
def take_offline(request: UserRequest, tenant: Tenant, adapter: Adapter) -> str:
    """Take the adapter offline under all of its names."""
    actions.take_offline(actor=request.user, adapter=adapter)
    return f"{adapter.name} is offline. A rollback brings it back."


@post_action
def pin(request: UserRequest, tenant: Tenant, adapter: Adapter) -> str:
    """Pin the adapter in replicas' memory, or unpin it."""
    if request.POST.get("pinned") == "no":
        actions.unpin(actor=request.user, adapter=adapter)
        return f"{adapter.name} isn't pinned any more: it is unloaded when others need the memory."
    actions.pin(actor=request.user, adapter=adapter)
    return f"{adapter.name} is pinned: every replica loads it within seconds and keeps it."


@post_action
def change(request: UserRequest, tenant: Tenant, adapter: Adapter, number: int) -> str:
    """Revalidate, retire or delete a version."""
    version = access.access_version(request.user, adapter, number)
    action, text = {
        "check": (actions.revalidate_version, "waits for its check"),
        "retire": (actions.retire_version, "is retired"),
        "delete": (actions.delete_version, "is deleted"),
    }.get(request.POST.get("operation", ""), (None, ""))
    if action is None:
        raise InvalidRequest("operation must be check, retire or delete.", param="operation")
    action(actor=request.user, version=version)
    return f"Version {number} {text}."


@post_action
def delete_alias(request: UserRequest, tenant: Tenant, adapter: Adapter) -> str:
    alias = access.access_alias(request.user, adapter, request.POST.get("alias", ""))
    actions.delete_alias(actor=request.user, alias=alias)
    return f"{alias.name} is no longer a name of this adapter."


@post_action
def delete(request: UserRequest, tenant: Tenant, adapter: Adapter) -> str:
    name = adapter.name
    actions.delete_adapter(actor=request.user, adapter=adapter)
    return f"{name} is deleted with all of its versions."


def post_int(request: UserRequest, name: str, default: int | None = None) -> int:
    text = request.POST.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest(f"{name} must be a whole number.", param=name)
    return int(text)


def _rows(user: User, tenant: Tenant) -> list[Adapter]:
    return list(_prefetch(access.access_adapters(user, tenant))[:MAX_ROWS])


def _prefetch(rows: QuerySet[Adapter]) -> QuerySet[Adapter]:
    aliases = AdapterAlias.objects.select_related("version", "canary", "previous")
    return rows.prefetch_related("versions", Prefetch("aliases", queryset=aliases))


def _residency(rows: Iterable[Adapter], *, operator: bool) -> dict[str, list[dict[str, Any]]]:
    """Locations by digest; empty without Redis: the page then shows only the database rows."""
    digests = {v.digest for row in rows for v in row.versions.all() if v.digest}
    try:
        return residency(live_replicas(), digests, operator=operator)
    except redis.RedisError:
        return {}


def _figures(row: Adapter, locations: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    versions = row.versions.all()
    return {
        "id": row.pk,
        "state": state_of(row),
        "versions": {str(v.number): v.state for v in versions},
        "residency": {
            v.digest: [spot | {"version": v.number} for spot in locations.get(v.digest, [])]
            for v in versions
            if v.digest
        },
    }


def state_of(row: Adapter) -> str:
    """State of the adapter: "live", "checking", "ready", "failed" or "offline"."""
    states = {version.state for version in row.versions.all()}
    if VersionState.LIVE in states:
        return "live"
    if states & set(WORKING):
        return "checking"
    for state in (VersionState.READY, VersionState.FAILED):
        if state in states:
            return str(state.value)
    return "offline"


def _flash(request: UserRequest, tenant: Tenant | None) -> str:
    outcome = pop_one_time(request) if request.method == "GET" else {}
    return str(outcome.get("text", "")) if tenant and outcome.get("tenant") == tenant.slug else ""


def _common(
    request: UserRequest, tenant: Tenant | None, error: QuireError | None
) -> dict[str, Any]:
    user = request.user
    context = {**tenant_context(user, tenant), "error": error, "outcome": _flash(request, tenant)}
    if tenant is not None:
        role = access_role(user, tenant)
        context |= {
            "may_add": role.rank >= Role.MEMBER.rank,
            "admin": role.rank >= Role.ADMIN.rank,
            "operator": to_actor(user).is_operator,
            "days": DAYS,
        }
    return context


def _list(
    request: UserRequest, tenant: Tenant | None, error: QuireError | None = None
) -> HttpResponse:
    user = request.user
    context = _common(request, tenant, error)
    if tenant is not None:
        rows = _rows(user, tenant)
        usage = usage_of(user, tenant, rows)
        locations = _residency(rows, operator=context["operator"])
        context |= {
            "rows": [_row(row, usage[row.pk], locations) for row in rows],
            "most": MAX_ROWS,
            "more": len(rows) == MAX_ROWS,
            "models": access_served_models(tenant).order_by("name"),
            "used": used_bytes(tenant),
            "room": max_tenant_adapter_bytes(),
            **_request_context(request, tenant),
        }
    status = error.status if error else 200
    return render(request, "console/adapters.html", context, status=status)


def _request_context(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    """Template context of the ledger entry that `?request=` names."""
    request_id = request.GET.get("request", "").strip()
    entry: UsageEntry | None = None
    if request_id:
        try:
            entry = access_request(request.user, tenant, request_id)
        except NotFound:
            entry = None
    return {"searched_id": request_id, "entry": entry}


def _row(
    row: Adapter, usage: dict[str, Any], locations: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    versions, aliases = list(row.versions.all()), list(row.aliases.all())
    served = [alias for alias in aliases if alias.version is not None]
    spots = [spot for v in versions for spot in locations.get(v.digest, [])]
    return {
        "adapter": row,
        "state": state_of(row),
        "served": served,
        "newest": versions[0] if versions else None,
        "use": usage,
        "lies": spots,
        "signature": _signature(row),
    }


def _signature(row: Adapter) -> str:
    """A text that changes whenever the state of a version changes."""
    versions = sorted(row.versions.all(), key=attrgetter("number"))
    return ",".join(f"{version.number}:{version.state}" for version in versions)


def _one(
    request: UserRequest, tenant: Tenant, pk: int, error: QuireError | None = None
) -> HttpResponse:
    user = request.user
    adapter = _prefetch(access.access_adapters(user, tenant)).filter(pk=pk).first()
    if adapter is None:
        raise NotFound("Adapter not found.")
    context = _common(request, tenant, error)
    usage = usage_of(user, tenant, [adapter])[adapter.pk]
    locations = _residency([adapter], operator=context["operator"])
    versions = list(adapter.versions.all())
    may_change = context["admin"] if adapter.tenant is not None else context["operator"]
    context |= {
        "adapter": adapter,
        "state": state_of(adapter),
        "signature": _signature(adapter),
        "versions": [_version(v, usage, locations, context["operator"]) for v in versions],
        "passed": [v for v in versions if v.state in PASSED],
        "aliases": [_traffic(alias) for alias in adapter.aliases.all()],
        "use": usage,
        "may_change": may_change,
        "may_check": context["may_add"] if adapter.tenant is not None else context["operator"],
        "base_url": request.build_absolute_uri(mounted("/v1")),
    }
    status = error.status if error else 200
    return render(request, "console/adapter.html", context, status=status)


def _version(
    version: Any, usage: dict[str, Any], locations: dict[str, Any], operator: bool
) -> dict[str, Any]:
    hidden = version.source.startswith("/") and not operator
    report = version.report if isinstance(version.report, dict) else {}
    return {
        "row": version,
        "source": "the server" if hidden else version.source,
        "probe": report.get("probe"),
        "modules": report.get("target_modules") or [],
        "requests": usage["by_digest"].get(version.digest, 0),
        "lies": locations.get(version.digest, []),
        "working": version.state in WORKING,
        "again": version.state in ("failed", "ready", "retired"),
        "retirable": version.state in ("failed", "ready"),
        "deletable": version.state != "live",
    }


def _traffic(alias: AdapterAlias) -> dict[str, Any]:
    canary = alias.canary_percent if alias.canary is not None else 0
    return {"alias": alias, "canary": canary, "main": 100 - canary}
