"""The pages of tenants: all that one may see, and each one's home."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import redis
from django import forms
from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from accounts.reauthentication import reauthentication_required
from common.errors import NotFound
from common.files import download
from common.one_time import pop_one_time
from common.one_time import store_one_time as store_one_time
from console.views.base import (
    SESSION_TENANT,
    cleaned_or_400,
    current_tenant,
    deed,
    post_int,
    render_page,
    tenant_context,
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
    first_tenant,
)
from tenants.actions.tenants import MAX_RESERVED_FRACTION
from tenants.actors import to_actor
from tenants.models import ApiKey, Role, Tenant, User
from tenants.tenant_data import data_kinds, export_chunks

# -- The page of a tenant's data, for its owners: how long it's kept, taking it along, erasing it.


@require_safe
@never_cache
@login_required
def data(request: HttpRequest) -> HttpResponse:
    """What is kept of one of the user's tenants."""
    return render_page(request, show)


def show(
    request: HttpRequest,
    tenant: Tenant | None,
    *,
    told: dict[str, Any] | None = None,
    error: QuireError | None = None,
) -> HttpResponse:
    """The page, with what was just done or refused."""
    user: Any = request.user
    tenant = tenant or first_tenant(user)
    context: dict[str, Any] = {**tenant_context(user, tenant), "told": told, "error": error}
    if tenant is not None and access_role(user, tenant) == Role.OWNER:
        kinds = [each.name.replace("-", " ") for each in data_kinds() if each.rows]
        context |= {"owns": True, "kinds": kinds}
    return render(
        request, "console/tenant_data.html", context, status=error.status if error else 200
    )


@reauthentication_required
@deed("data", show)
def keep(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """How many days content is kept, and whether the playground's conversations are."""
    days, talks = post_int(request, "days"), request.POST.get("conversations") == "yes"
    actions.update_tenant(
        actor=request.user, tenant=tenant, keep_content_days=days, keep_conversations=talks
    )
    if days is None:
        return {"text": "Each item is kept for its own lifetime."}
    return {"text": f"Content is kept for {days} days; workers delete older content."}


@reauthentication_required
@require_POST
@never_cache
@login_required
def export(request: HttpRequest) -> HttpResponseBase:
    """All of it as a ZIP archive."""
    tenant = None
    try:
        tenant = _named(request)
        actions.log_export(actor=request.user, tenant=tenant)
    except QuireError as error:
        return show(request, tenant, error=error)
    return download(request, export_chunks(tenant), f"{tenant.slug}.zip", "application/zip")


@reauthentication_required
@require_POST
@never_cache
@login_required
def erase(request: HttpRequest) -> HttpResponse:
    """For good. Sessions of its members end, so the way leads to the login."""
    tenant = None
    try:
        tenant = _named(request)
        confirm = request.POST.get("confirm", "")
        actions.erase_tenant(actor=request.user, tenant=tenant, confirm=confirm)
    except QuireError as error:
        return show(request, tenant, error=error)
    return redirect("login")


def _named(request: HttpRequest) -> Tenant:
    """Raises `NotFound`."""
    tenant = current_tenant(request)
    if tenant is None:
        raise NotFound("You belong to no tenant.")
    return tenant


# -- What a tenant and its keys use: of their limits right now, and in the last days.


DAYS = 30
MAX_KEYS = 200


@dataclass(frozen=True)
class Limit:
    """A limit with its present use; `used` None: Redis is away, `maximum` None: no limit."""

    name: str
    maximum: int | None
    used: int | None

    @property
    def high(self) -> int:
        """From here on it's nearly used up."""
        return (self.maximum or 0) * 8 // 10


def current_limits(tenant: Tenant) -> list[Limit]:
    """Requests and tokens a minute, and requests at a time."""
    quire = settings.QUIRE
    default = {
        "requests": quire["DEFAULT_REQUESTS_PER_MINUTE"],
        "tokens": quire["DEFAULT_TOKENS_PER_MINUTE"],
    }
    own = {"requests": tenant.requests_per_minute, "tokens": tenant.tokens_per_minute}
    found = []
    client = sync_client()
    try:
        for kind, title in (("requests", "Requests a minute"), ("tokens", "Tokens a minute")):
            given = own[kind]
            most = (default[kind] if given is None else given) or None
            found.append(Limit(title, most, _bucket_used(client, kind, tenant.pk, most)))
        most = tenant.max_running_requests or None
        found.append(Limit("Requests at a time", most, _running(client, tenant.pk, most)))
    finally:
        client.close()
    return found


def _bucket_used(client: redis.Redis, kind: str, pk: int, most: int | None) -> int | None:
    """What of a minute's worth is gone: a bucket refills evenly since it was last touched."""
    if most is None:
        return None
    try:
        level, at = client.hmget(TokenBucket(kind, "tenant", pk, most).redis_key, "level", "at")
    except redis.RedisError:
        return None
    if level is None or at is None:
        return 0
    now = float(level) + max(0.0, time.time() - float(at)) * most / 60
    return max(0, min(most, round(most - now)))


def _running(client: redis.Redis, pk: int, most: int | None) -> int | None:
    if most is None:
        return None
    try:
        return int(client.scard(ConcurrencyLimit("tenant", pk, most).redis_key))
    except redis.RedisError:
        return None


def usage_by_tenant(ids: Sequence[int]) -> dict[int, UsageTotals]:
    """The last `DAYS` days of each, by row."""
    slugs = dict(Tenant.objects.filter(pk__in=ids).values_list("slug", "pk"))
    found: dict[int, UsageTotals] = {}
    for sums in _report(["project_id"], ids):
        pk = slugs.get(sums.group["project_id"] or "")
        if pk is not None:
            _add(found.setdefault(pk, UsageTotals(sums.start)), sums)
    return found


def keys_with_usage(user: User, tenant: Tenant) -> list[tuple[ApiKey, UsageTotals | None]]:
    """The keys that the user may see and that aren't revoked, those used last first."""
    keys = access_keys(user, tenant).filter(revoked_at=None)
    found: dict[str, UsageTotals] = {}
    for sums in _report(["api_key_id"], [tenant.pk]):
        name = sums.group["api_key_id"]
        if name:
            _add(found.setdefault(name, UsageTotals(sums.start)), sums)
    rows = list(keys.order_by("-last_used_at", "-pk")[:MAX_KEYS])
    return [(key, found.get(key.public_id)) for key in rows]


def _report(by: list[str], ids: Sequence[int]) -> list[UsageTotals]:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    question: dict[str, Any] = {"width": "1d", "group_by": by, "tenants": list(ids)}
    first = today - timedelta(days=DAYS - 1)
    return report(UsageQuery(start=first, end=today + timedelta(days=1), **question), whole=True)


def _add(into: UsageTotals, sums: UsageTotals) -> None:
    tokens = (sums.prompt_tokens, sums.cached_tokens, sums.completion_tokens)
    into.add((sums.requests, *tokens, sums.cost_nanos))


MAX_ROWS = 500
#: What operators set, as the form calls it.
NUMBERS = {
    "requests_per_minute": "Requests a minute",
    "tokens_per_minute": "Tokens a minute",
    "max_running_requests": "Requests at a time",
    "max_context_tokens": "Tokens in one request",
}


class NewTenant(forms.Form):
    """A tenant to be made."""

    name = forms.CharField(max_length=200, widget=forms.TextInput(attrs={"class": "input"}))
    slug = forms.CharField(
        max_length=63,
        required=False,
        label="Short name",
        widget=forms.TextInput(attrs={"class": "input", "placeholder": "derived from the name"}),
    )


class LimitsForm(forms.Form):
    """Share and limits of a tenant; bounds are checked by what sets them."""

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


@require_safe
@never_cache
@login_required
def tenants(request: HttpRequest) -> HttpResponse:
    """Those that the user belongs to; operators all. A member of one alone is led to its home."""
    user: Any = request.user
    own = access_tenants(user)
    operator = to_actor(user).is_operator
    if not operator and own.filter(active=True).count() == 1:
        return redirect("tenant", own.filter(active=True).get().slug)
    return _list(request)


@require_safe
@never_cache
@login_required
def tenant(request: HttpRequest, slug: str) -> HttpResponse:
    """A tenant's home."""
    return _home(request, slug)


@require_POST
@never_cache
@login_required
def create(request: HttpRequest) -> HttpResponse:
    """A new tenant, by operators."""
    user: Any = request.user
    try:
        made = actions.create_tenant(actor=user, **cleaned_or_400(NewTenant(request.POST)))
    except QuireError as error:
        return _list(request, error)
    store_one_time(
        request, tenant=made.slug, text=f"{made.name} is created. Invite its owner next."
    )
    return redirect("tenant", made.slug)


@require_POST
@never_cache
@login_required
def limit(request: HttpRequest, slug: str) -> HttpResponse:
    """Change a tenant's share and limits, by operators."""
    user: Any = request.user
    try:
        found = access_tenant(user, slug)
        actions.update_tenant(actor=user, tenant=found, **cleaned_or_400(LimitsForm(request.POST)))
    except QuireError as error:
        return _home(request, slug, error)
    store_one_time(request, tenant=slug, text="The limits are set; they apply within seconds.")
    return redirect("tenant", slug)


def _list(request: HttpRequest, error: QuireError | None = None) -> HttpResponse:
    user: Any = request.user
    found = access_tenants(user).annotate(
        people=Count("memberships", distinct=True),
        live_keys=Count("api_keys", filter=Q(api_keys__revoked_at=None), distinct=True),
    )
    rows = list(found.order_by("-active", "name")[:MAX_ROWS])
    use = usage_by_tenant([row.pk for row in rows])
    context = {
        "rows": [(row, *_amounts(use.get(row.pk))) for row in rows],
        "days": DAYS,
        "operator": to_actor(user).is_operator,
        "form": NewTenant(request.POST if error is not None else None),
        "error": error,
    }
    status = error.status if error is not None else 200
    return render(request, "console/tenants.html", context, status=status)


def _amounts(use: UsageTotals | None) -> tuple[int, int]:
    """Requests and tokens."""
    return (use.requests, use.prompt_tokens + use.completion_tokens) if use else (0, 0)


def _home(request: HttpRequest, slug: str, error: QuireError | None = None) -> HttpResponse:
    user: Any = request.user
    try:
        found = access_tenant(user, slug)
    except QuireError as missing:
        return render(request, "console/tenant.html", {"error": missing}, status=missing.status)
    if request.session.get(SESSION_TENANT) != slug:
        request.session[SESSION_TENANT] = slug
    kept = pop_one_time(request) if request.method == "GET" else {}
    role = access_role(user, found)
    operator = to_actor(user).is_operator
    context = {
        "home": found,
        "role": role,
        "admin": role.rank >= Role.ADMIN.rank,
        "told": kept if kept.get("tenant") == slug else {},
        "error": error,
        "members": access_members(user, found).order_by("user__username")[:MAX_ROWS],
        "limits": current_limits(found),
        "keys": keys_with_usage(user, found),
        "days": DAYS,
        "budgets": states_of(list(access_budgets(user, found)[:MAX_ROWS])),
        "usage": usage_by_tenant([found.pk]).get(found.pk),
        "operator": operator,
    }
    if operator:
        context |= _limits(request, found, error)
    status = error.status if error is not None else 200
    return render(request, "console/tenant.html", context, status=status)


def _limits(request: HttpRequest, found: Tenant, error: QuireError | None) -> dict[str, Any]:
    """The form, and beside the reserve what the others have reserved already."""
    names = ("weight", "kv_reserved_fraction", "kv_max_fraction", *NUMBERS)
    now = {name: getattr(found, name) for name in names}
    others = reserved_sum(Tenant.objects.filter(active=True).exclude(pk=found.pk))
    return {
        "form": LimitsForm(request.POST if error is not None else None, initial=now),
        "wrong": error.param if error is not None else None,
        "others_reserve": others,
        "left": max(0.0, MAX_RESERVED_FRACTION * 100 - others),
        "most": MAX_RESERVED_FRACTION * 100,
        "action": reverse("limit-tenant", args=[found.slug]),
    }
