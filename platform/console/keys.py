"""The page where people make, rotate and revoke API keys. It works without scripts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from engine.errors import QuireError
from tenants import actions, scopes
from tenants.access import access_key, access_keys, access_role, access_tenant, access_tenants
from tenants.actors import as_actor
from tenants.models import ApiKey, Role, Tenant, User

#: Rows that the page shows; the newest of a tenant that has more.
MOST_KEYS = 200
MOST_TENANTS = 500
#: What each scope allows, in the order of the form.
SCOPE_WORDS = {
    scopes.INFERENCE: "ask models",
    scopes.MODELS: "list models",
    scopes.USAGE: "read the tenant's usage",
    scopes.OPERATOR: "operate the installation: caches, load, all tenants",
}
LIFETIMES = {"": "never", "30": "in 30 days", "90": "in 90 days", "365": "in a year"}
#: Hours that a key which is being replaced goes on working.
OVERLAPS = {"24": "for a day", "168": "for a week", "1": "for an hour", "0": "not any more"}


class NewKeyForm(forms.Form):
    """What a new key is for, what it may, and until when."""

    name = forms.CharField(
        max_length=100,
        required=False,
        label="What it is for",
        widget=forms.TextInput(
            attrs={
                "class": "input",
                "autocomplete": "off",
                "placeholder": "such as: nightly reports",
            }
        ),
    )
    scopes = forms.MultipleChoiceField(label="It may", widget=forms.CheckboxSelectMultiple)
    lifetime = forms.ChoiceField(
        choices=list(LIFETIMES.items()),
        required=False,
        label="It ends",
        widget=forms.Select(attrs={"class": "input"}),
    )

    def __init__(self, *args: Any, operator: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        offered = scopes.ALL if operator else scopes.DEFAULT
        words = [
            (name, f"{word} ({name})") for name, word in SCOPE_WORDS.items() if name in offered
        ]
        field: Any = self.fields["scopes"]
        field.choices, field.initial = words, sorted(scopes.DEFAULT)

    def values(self) -> dict[str, Any]:
        """For `create_key`."""
        data = self.cleaned_data
        days = data["lifetime"]
        until = timezone.now() + timedelta(days=int(days)) if days else None
        return {"name": data["name"], "scopes": data["scopes"], "expires_at": until}


class OverlapForm(forms.Form):
    """How long the old key goes on working."""

    overlap = forms.ChoiceField(choices=list(OVERLAPS.items()))


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
@login_required
def keys(request: HttpRequest) -> HttpResponse:
    """The keys of one of the user's tenants; by POST a new one, shown in the answer alone."""
    user: Any = request.user
    operator = as_actor(user).is_operator
    form = NewKeyForm(operator=operator)
    context: dict[str, Any] = {}
    try:
        tenant = _tenant(request)
        if request.method == "POST" and tenant is not None:
            form = NewKeyForm(request.POST, operator=operator)
            if form.is_valid():
                context["made"] = actions.create_key(actor=user, tenant=tenant, **form.values())
                form = NewKeyForm(operator=operator)
    except QuireError as error:
        return _page(request, _first(user), form, error=error)
    return _page(request, tenant, form, **context)


@require_POST
@never_cache
@login_required
def rotate(request: HttpRequest, pk: int) -> HttpResponse:
    """Another key in this one's place, shown in the answer and never again."""

    def deed(user: User, key: ApiKey) -> dict[str, Any]:
        form = OverlapForm(request.POST)
        hours = int(form.cleaned_data["overlap"]) if form.is_valid() else 24
        made = actions.rotate_key(actor=user, key=key, overlap=timedelta(hours=hours))
        return {"made": made, "replaced": key, "overlap": OVERLAPS[str(hours)]}

    return _change(request, pk, deed)


@require_POST
@never_cache
@login_required
def revoke(request: HttpRequest, pk: int) -> HttpResponse:
    """Refuse the key from now on."""
    return _change(
        request, pk, lambda user, key: {"revoked": actions.revoke_key(actor=user, key=key)}
    )


def _change(
    request: HttpRequest, pk: int, deed: Callable[[User, ApiKey], dict[str, Any]]
) -> HttpResponse:
    """Do something to one of the user's keys, then show the page with what came of it."""
    user: Any = request.user
    form = NewKeyForm(operator=as_actor(user).is_operator)
    tenant = None
    try:
        tenant = _tenant(request)
        if tenant is None:
            return _page(request, None, form)
        context = deed(user, access_key(user, tenant, pk))
    except QuireError as error:
        return _page(request, tenant or _first(user), form, error=error)
    return _page(request, tenant, form, **context)


def _tenant(request: HttpRequest) -> Tenant | None:
    """The tenant that is named, else the user's first. Raises `NotFound` for a stranger's."""
    user: Any = request.user
    named = request.POST.get("tenant") or request.GET.get("tenant")
    return access_tenant(user, named) if named else _first(user)


def _first(user: User) -> Tenant | None:
    return access_tenants(user).filter(active=True).order_by("pk").first()


def _page(
    request: HttpRequest,
    tenant: Tenant | None,
    form: NewKeyForm,
    *,
    error: QuireError | None = None,
    **context: Any,
) -> HttpResponse:
    user: Any = request.user
    found: list[ApiKey] = []
    may_make = False
    if tenant is not None:
        found = list(access_keys(user, tenant)[: MOST_KEYS + 1])
        may_make = access_role(user, tenant).rank >= Role.MEMBER.rank
    context |= {
        "tenant": tenant,
        "tenants": access_tenants(user).filter(active=True).order_by("name")[:MOST_TENANTS],
        "active": [key for key in found[:MOST_KEYS] if key.state() == "active"],
        "ended": [key for key in found[:MOST_KEYS] if key.state() != "active"],
        "more": len(found) > MOST_KEYS,
        "most": MOST_KEYS,
        "may_make": may_make,
        "form": form,
        "error": error,
        "overlaps": OVERLAPS.items(),
    }
    return render(request, "console/keys.html", context, status=error.status if error else 200)
