"""The pages of tenants: all that one may see, and each one's home."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.auth.decorators import login_required
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from console.deeds import checked
from console.fairness import reserved_sum
from console.tenancy import LOOKED_AT
from console.tenant_use import DAYS, keys_with_use, limits_now, usage_by_tenant
from engine.contract.errors import QuireError
from metering.access import Sums
from metering.spending import access_budgets, states_of
from tenants import actions
from tenants.access import access_members, access_role, access_tenant, access_tenants
from tenants.actors import as_actor
from tenants.kv_shares import MAX_RESERVED
from tenants.models import Role, Tenant
from tenants.shown_once import keep, take

MOST = 500
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
    operator = as_actor(user).is_operator
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
        made = actions.create_tenant(actor=user, **checked(NewTenant(request.POST)))
    except QuireError as error:
        return _list(request, error)
    keep(request, tenant=made.slug, text=f"{made.name} is created. Invite its owner next.")
    return redirect("tenant", made.slug)


@require_POST
@never_cache
@login_required
def limit(request: HttpRequest, slug: str) -> HttpResponse:
    """Change a tenant's share and limits, by operators."""
    user: Any = request.user
    try:
        found = access_tenant(user, slug)
        actions.update_tenant(actor=user, tenant=found, **checked(LimitsForm(request.POST)))
    except QuireError as error:
        return _home(request, slug, error)
    keep(request, tenant=slug, text="The limits are set; they apply within seconds.")
    return redirect("tenant", slug)


def _list(request: HttpRequest, error: QuireError | None = None) -> HttpResponse:
    user: Any = request.user
    found = access_tenants(user).annotate(
        people=Count("memberships", distinct=True),
        live_keys=Count("api_keys", filter=Q(api_keys__revoked_at=None), distinct=True),
    )
    rows = list(found.order_by("-active", "name")[:MOST])
    use = usage_by_tenant([row.pk for row in rows])
    context = {
        "rows": [(row, *_amounts(use.get(row.pk))) for row in rows],
        "days": DAYS,
        "operator": as_actor(user).is_operator,
        "form": NewTenant(request.POST if error is not None else None),
        "error": error,
    }
    status = error.status if error is not None else 200
    return render(request, "console/tenants.html", context, status=status)


def _amounts(use: Sums | None) -> tuple[int, int]:
    """Requests and tokens."""
    return (use.requests, use.prompt_tokens + use.completion_tokens) if use else (0, 0)


def _home(request: HttpRequest, slug: str, error: QuireError | None = None) -> HttpResponse:
    user: Any = request.user
    try:
        found = access_tenant(user, slug)
    except QuireError as missing:
        return render(request, "console/tenant.html", {"error": missing}, status=missing.status)
    if request.session.get(LOOKED_AT) != slug:
        request.session[LOOKED_AT] = slug
    kept = take(request) if request.method == "GET" else {}
    role = access_role(user, found)
    operator = as_actor(user).is_operator
    context = {
        "home": found,
        "role": role,
        "admin": role.rank >= Role.ADMIN.rank,
        "told": kept if kept.get("tenant") == slug else {},
        "error": error,
        "members": access_members(user, found).order_by("user__username")[:MOST],
        "limits": limits_now(found),
        "keys": keys_with_use(user, found),
        "days": DAYS,
        "budgets": states_of(list(access_budgets(user, found)[:MOST])),
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
        "left": max(0.0, MAX_RESERVED * 100 - others),
        "most": MAX_RESERVED * 100,
        "action": reverse("limit-tenant", args=[found.slug]),
    }
