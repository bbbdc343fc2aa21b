"""The pages of tenants: the list, a tenant's home, and its data for owners."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import redis
from django import forms
from django.conf import settings
from django.db.models import Count, Q
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse

from common.files import download
from common.one_time import pop_one_time, store_one_time
from console.views.base import (
    SESSION_TENANT,
    TenantPage,
    change_view,
    cleaned_or_400,
    page_view,
    post_int,
    require_tenant,
)
from engine.contract.errors import QuireError
from history.queries import reserved_sum
from metering.access import UsageQuery, UsageTotals, report
from metering.budgets import access_budgets, states_of
from metering.redis_scripts import sync_client
from metering.rules import ConcurrencyLimit, TokenBucket
from tenants import actions
from tenants.access import (
    access_keys,
    access_members,
    access_role,
    access_tenant,
    access_tenants,
)
from tenants.actions.tenants import MAX_RESERVED_FRACTION
from tenants.actors import to_actor
from tenants.caller import MediaLimits
from tenants.models import ApiKey, Role, Tenant, User
from tenants.sessions import UserRequest
from tenants.tenant_data import data_kinds, export_chunks


def _data_context(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    if access_role(request.user, tenant) != Role.OWNER:
        return {}
    kinds = [kind.name.replace("-", " ") for kind in data_kinds() if kind.rows]
    return {"owns": True, "kinds": kinds}


#: Retention, export and erasure of one of the user's tenants. Owners only.
data = TenantPage("data", "tenant_data", _data_context)


@data.action
def keep(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    """Set the retention of content, and whether playground conversations are stored."""
    days = post_int(request, "days")
    actions.update_tenant(
        actor=request.user,
        tenant=tenant,
        keep_content_days=days,
        keep_conversations=request.POST.get("conversations") == "yes",
    )
    if days is None:
        return {"text": "Each item is kept for its own lifetime."}
    return {"text": f"Content is kept for {days} days; workers delete older content."}


@change_view
def export(request: UserRequest) -> HttpResponseBase:
    """Download all of the tenant's data as a ZIP archive."""
    tenant = None
    try:
        tenant = require_tenant(request)
        actions.log_export(actor=request.user, tenant=tenant)
    except QuireError as error:
        return data.show(request, tenant, error=error)
    return download(request, export_chunks(tenant), f"{tenant.slug}.zip", "application/zip")


@change_view
def erase(request: UserRequest) -> HttpResponse:
    """Erase the tenant. This ends its members' sessions, so the view redirects to the login."""
    tenant = None
    try:
        tenant = require_tenant(request)
        confirm = request.POST.get("confirm", "")
        actions.erase_tenant(actor=request.user, tenant=tenant, confirm=confirm)
    except QuireError as error:
        return data.show(request, tenant, error=error)
    return redirect("login")


DAYS = 30
MAX_KEYS = 200


@dataclass(frozen=True)
class Limit:
    """A limit and its current use. `used` is None without Redis; `maximum` is None if unlimited."""

    name: str
    maximum: int | None
    used: int | None

    @property
    def high(self) -> int:
        """Usage from which the limit is shown as nearly exhausted."""
        return (self.maximum or 0) * 8 // 10


def current_limits(tenant: Tenant) -> list[Limit]:
    """Requests, tokens and media per minute, and running requests."""
    quotas = settings.QUIRE.tenant_quotas
    buckets = [
        ("requests", "requests_per_minute", quotas.requests_per_minute),
        ("tokens", "tokens_per_minute", quotas.tokens_per_minute),
        *((kind, f"{kind}_per_minute", 0) for kind in MediaLimits._fields),
    ]
    limits = []
    client = sync_client()
    try:
        for kind, name, default in buckets:
            value = getattr(tenant, name)
            maximum = (default if value is None else value) or None
            if maximum is None and kind in MediaLimits._fields:
                continue
            used = _bucket_used(client, kind, tenant.pk, maximum)
            limits.append(Limit(NUMBERS[name], maximum, used))
        maximum = tenant.max_running_requests or None
        limits.append(Limit("Requests at a time", maximum, _running(client, tenant.pk, maximum)))
    finally:
        client.close()
    return limits


def _bucket_used(client: redis.Redis, kind: str, pk: int, maximum: int | None) -> int | None:
    """Used part of a per-minute quota; the bucket refills linearly since its last update."""
    if maximum is None:
        return None
    try:
        level, updated_at = client.hmget(
            TokenBucket(kind, "tenant", pk, maximum).redis_key, "level", "at"
        )
    except redis.RedisError:
        return None
    if level is None or updated_at is None:
        return 0
    available = float(level) + max(0.0, time.time() - float(updated_at)) * maximum / 60
    return max(0, min(maximum, round(maximum - available)))


def _running(client: redis.Redis, pk: int, maximum: int | None) -> int | None:
    if maximum is None:
        return None
    try:
        return int(client.scard(ConcurrencyLimit("tenant", pk, maximum).redis_key))
    except redis.RedisError:
        return None


def usage_by_tenant(ids: Sequence[int]) -> dict[int, UsageTotals]:
    """Tenant id -> usage of the last `DAYS` days."""
    slugs = dict(Tenant.objects.filter(pk__in=ids).values_list("slug", "pk"))
    totals: dict[int, UsageTotals] = {}
    for sums in _report(["project_id"], ids):
        pk = slugs.get(sums.group["project_id"] or "")
        if pk is not None:
            totals.setdefault(pk, UsageTotals(sums.start)).add(sums.amounts)
    return totals


def keys_with_usage(user: User, tenant: Tenant) -> list[tuple[ApiKey, UsageTotals | None]]:
    """The user's visible keys that aren't revoked, most recently used first, with usage."""
    keys = access_keys(user, tenant).filter(revoked_at=None)
    totals: dict[str, UsageTotals] = {}
    for sums in _report(["api_key_id"], [tenant.pk]):
        name = sums.group["api_key_id"]
        if name:
            totals.setdefault(name, UsageTotals(sums.start)).add(sums.amounts)
    rows = list(keys.order_by("-last_used_at", "-pk")[:MAX_KEYS])
    return [(key, totals.get(key.public_id)) for key in rows]


def _report(by: list[str], ids: Sequence[int]) -> list[UsageTotals]:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    query = UsageQuery(
        start=today - timedelta(days=DAYS - 1),
        end=today + timedelta(days=1),
        width="1d",
        group_by=by,
        tenants=list(ids),
    )
    return report(query, total=True)


MAX_ROWS = 500
#: Limits that operators set -> label in the form.
NUMBERS = {
    "requests_per_minute": "Requests per minute",
    "tokens_per_minute": "Tokens per minute",
    "media_per_minute": "Images, videos, documents and audio files per minute",
    "media_bytes_per_minute": "Bytes of such files per minute",
    "media_seconds_per_minute": "Seconds of decoding them per minute",
    "max_running_requests": "Requests at a time",
    "max_context_tokens": "Tokens in one request",
}


class NewTenant(forms.Form):
    """A new tenant."""

    name = forms.CharField(max_length=200, widget=forms.TextInput(attrs={"class": "input"}))
    slug = forms.CharField(
        max_length=63,
        required=False,
        label="Short name",
        widget=forms.TextInput(attrs={"class": "input", "placeholder": "derived from the name"}),
    )


class LimitsForm(forms.Form):
    """Share and limits of a tenant; `update_tenant` validates their ranges."""

    weight = forms.FloatField(label="Weight")
    kv_reserved_fraction = forms.FloatField(label="KV cache reserved")
    kv_max_fraction = forms.FloatField(label="KV cache at most")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, label in NUMBERS.items():
            self.fields[name] = forms.IntegerField(required=False, min_value=0, label=label)
        for name, field in self.fields.items():
            field.widget = forms.TextInput(attrs={"class": "input", "autocomplete": "off"})
            if name in NUMBERS:
                field.widget.attrs |= {"inputmode": "numeric", "placeholder": "no limit of its own"}
            else:
                field.widget.attrs["inputmode"] = "decimal"


@page_view
def tenants(request: UserRequest) -> HttpResponse:
    """List the user's tenants, or all for operators; redirect members of only one to its home."""
    user = request.user
    active = access_tenants(user).filter(active=True)
    if not to_actor(user).is_operator and active.count() == 1:
        return redirect("tenant", active.get().slug)
    return _list(request)


@page_view
def tenant(request: UserRequest, slug: str) -> HttpResponse:
    return _home(request, slug)


@change_view
def create(request: UserRequest) -> HttpResponse:
    """Create a tenant. Operators only."""
    user = request.user
    try:
        tenant = actions.create_tenant(actor=user, **cleaned_or_400(NewTenant(request.POST)))
    except QuireError as error:
        return _list(request, error)
    store_one_time(
        request, tenant=tenant.slug, text=f"{tenant.name} is created. Invite its owner next."
    )
    return redirect("tenant", tenant.slug)


@change_view
def limit(request: UserRequest, slug: str) -> HttpResponse:
    """Change a tenant's share and limits. Operators only."""
    user = request.user
    try:
        tenant = access_tenant(user, slug)
        actions.update_tenant(actor=user, tenant=tenant, **cleaned_or_400(LimitsForm(request.POST)))
    except QuireError as error:
        return _home(request, slug, error)
    store_one_time(request, tenant=slug, text="The limits are set; they apply within seconds.")
    return redirect("tenant", slug)


def _list(request: UserRequest, error: QuireError | None = None) -> HttpResponse:
    user = request.user
    tenants = access_tenants(user).annotate(
        people=Count("memberships", distinct=True),
        live_keys=Count("api_keys", filter=Q(api_keys__revoked_at=None), distinct=True),
    )
    rows = list(tenants.order_by("-active", "name")[:MAX_ROWS])
    usage = usage_by_tenant([row.pk for row in rows])
    context = {
        "rows": [(row, *_amounts(usage.get(row.pk))) for row in rows],
        "days": DAYS,
        "operator": to_actor(user).is_operator,
        "form": NewTenant(request.POST if error is not None else None),
        "error": error,
    }
    status = error.status if error is not None else 200
    return render(request, "console/tenants.html", context, status=status)


def _amounts(usage: UsageTotals | None) -> tuple[int, int]:
    """Total requests and tokens."""
    return (usage.requests, usage.prompt_tokens + usage.completion_tokens) if usage else (0, 0)


def _home(request: UserRequest, slug: str, error: QuireError | None = None) -> HttpResponse:
    user = request.user
    try:
        tenant = access_tenant(user, slug)
    except QuireError as missing:
        return render(request, "console/tenant.html", {"error": missing}, status=missing.status)
    if request.session.get(SESSION_TENANT) != slug:
        request.session[SESSION_TENANT] = slug
    outcome = pop_one_time(request) if request.method == "GET" else {}
    role = access_role(user, tenant)
    operator = to_actor(user).is_operator
    context = {
        "home": tenant,
        "membership": user.memberships.filter(tenant=tenant).first(),
        "admin": role.rank >= Role.ADMIN.rank,
        "outcome": outcome if outcome.get("tenant") == slug else {},
        "error": error,
        "members": access_members(user, tenant).order_by("user__username")[:MAX_ROWS],
        "limits": current_limits(tenant),
        "keys": keys_with_usage(user, tenant),
        "days": DAYS,
        "budgets": states_of(list(access_budgets(user, tenant)[:MAX_ROWS])),
        "usage": usage_by_tenant([tenant.pk]).get(tenant.pk),
        "operator": operator,
    }
    if operator:
        context |= _limits(request, tenant, error)
    status = error.status if error is not None else 200
    return render(request, "console/tenant.html", context, status=status)


def _limits(request: UserRequest, tenant: Tenant, error: QuireError | None) -> dict[str, Any]:
    """Template context of the limits form, with the share reserved by other tenants."""
    names = ("weight", "kv_reserved_fraction", "kv_max_fraction", *NUMBERS)
    initial = {name: getattr(tenant, name) for name in names}
    other_reservations = reserved_sum(Tenant.objects.filter(active=True).exclude(pk=tenant.pk))
    return {
        "form": LimitsForm(request.POST if error is not None else None, initial=initial),
        "wrong": error.param if error is not None else None,
        "others_reserve": other_reservations,
        "left": max(0.0, MAX_RESERVED_FRACTION * 100 - other_reservations),
        "most": MAX_RESERVED_FRACTION * 100,
        "action": reverse("limit-tenant", args=[tenant.slug]),
    }
