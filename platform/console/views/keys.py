"""The page where people make, rotate and revoke API keys. It works without scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib.auth.decorators import login_required
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from accounts.reauthentication import reauthentication_required
from common.one_time import pop_one_time
from console.views.base import current_tenant, redirect_with_message, tenant_context
from engine.contract.errors import QuireError
from metering.actions import set_budget
from metering.models import Period
from tenants import actions
from tenants import api_keys as scopes
from tenants.access import (
    access_key,
    access_keys,
    access_role,
    access_service_accounts,
    first_tenant,
)
from tenants.actors import to_actor
from tenants.models import ApiKey, Role, ServiceAccount, Tenant, User

# -- The part of the form of keys that narrows a key: models, places, rates, spending.


#: Whole numbers, as the form and the model call them.
AMOUNTS = {
    "requests_per_minute": "Requests a minute",
    "tokens_per_minute": "Tokens a minute",
    "max_running_requests": "Requests at a time",
    "max_context_tokens": "Tokens in one request, prompt and answer",
}
#: Lists, by commas or lines.
LISTS = {
    "allowed_models": ("Models", "small, large"),
    "endpoints": ("Paths", "/v1/embeddings"),
    "addresses": ("Addresses and networks", "10.0.0.0/8"),
}


class WordsField(forms.CharField):
    """Words between commas or on lines of their own; nothing is an empty list."""

    def clean(self, value: Any) -> list[str]:
        """The words."""
        text = super().clean(value).replace("\n", ",")
        return [word.strip() for word in text.split(",") if word.strip()]


class LimitsForm(forms.Form):
    """All empty: no more limits than the tenant's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, (label, example) in LISTS.items():
            attrs = {"class": "input", "autocomplete": "off", "placeholder": f"all, or {example}"}
            self.fields[name] = WordsField(
                required=False, max_length=4000, label=label, widget=forms.TextInput(attrs=attrs)
            )
        attrs = {"class": "input", "inputmode": "numeric", "autocomplete": "off"}
        attrs["placeholder"] = "no limit"
        for name, label in AMOUNTS.items():
            self.fields[name] = forms.IntegerField(
                required=False,
                min_value=1,
                max_value=2**31 - 1,
                label=label,
                widget=forms.TextInput(attrs=attrs),
            )
        self.fields["spending"] = forms.DecimalField(
            required=False,
            min_value=0,
            max_digits=16,
            decimal_places=9,
            label="Spending",
            widget=forms.TextInput(attrs={**attrs, "inputmode": "decimal"}),
        )
        self.fields["spending_period"] = forms.ChoiceField(
            required=False,
            choices=[(value, label.lower()) for value, label in Period.choices],
            initial=Period.MONTH,
            label="Per",
            widget=forms.Select(attrs={"class": "input"}),
        )

    def limits(self) -> dict[str, Any]:
        """For `create_key`: what was filled in alone."""
        data = self.cleaned_data
        return {name: data[name] for name in (*AMOUNTS, *LISTS) if data[name]}

    def budget(self) -> dict[str, Any] | None:
        """For `set_budget`; None without a limit of spending."""
        data = self.cleaned_data
        if data["spending"] is None:
            return None
        return {
            "amount": data["spending"],
            "period": data["spending_period"] or Period.MONTH,
        }

    def narrowing(self) -> list[forms.BoundField]:
        """The fields of this part, for the template."""
        return [self[name] for name in (*LISTS, *AMOUNTS, "spending", "spending_period")]

    def narrows(self) -> bool:
        """Whether this part of a form that was sent says anything, so that it's shown open."""
        return self.is_bound and any(self.data.get(name) for name in (*LISTS, *AMOUNTS, "spending"))


#: Rows that the page shows; the newest of a tenant that has more.
MAX_ROWS = 200
#: What each scope allows, in the order of the form.
SCOPE_WORDS = {
    scopes.INFERENCE: "use models",
    scopes.MODELS: "list models",
    scopes.USAGE: "read the tenant's usage",
    scopes.TENANT_ADMIN: "manage members, keys and service accounts of the tenant",
    scopes.OPERATOR: "operate the installation: caches, load, all tenants",
}
LIFETIMES = {"": "never", "30": "in 30 days", "90": "in 90 days", "365": "in a year"}
#: Hours that a key which is being replaced goes on working.
OVERLAPS = {"24": "for a day", "168": "for a week", "1": "for an hour", "0": "no longer"}


class NewKeyForm(LimitsForm):
    """What a new key is for, what it may, and until when."""

    name = forms.CharField(
        max_length=100,
        required=False,
        label="Name",
        widget=forms.TextInput(
            attrs={
                "class": "input",
                "autocomplete": "off",
                "placeholder": "such as: nightly reports",
            }
        ),
    )
    scopes = forms.MultipleChoiceField(label="Permissions", widget=forms.CheckboxSelectMultiple)
    lifetime = forms.ChoiceField(
        choices=list(LIFETIMES.items()),
        required=False,
        label="Expires",
        widget=forms.Select(attrs={"class": "input"}),
    )

    holder = forms.ChoiceField(
        required=False, label="Holder", widget=forms.Select(attrs={"class": "input"})
    )

    def __init__(
        self,
        *args: Any,
        operator: bool,
        admin: bool = False,
        accounts: Sequence[ServiceAccount] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.accounts = {str(account.pk): account for account in accounts}
        holder: Any = self.fields["holder"]
        holder.choices = [
            ("", "you: it expires with your membership"),
            *((pk, f"{account} (service account)") for pk, account in self.accounts.items()),
        ]
        offered = scopes.ALL if operator else scopes.DEFAULT
        if admin:
            offered |= {scopes.TENANT_ADMIN}
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
        return {
            "name": data["name"],
            "scopes": data["scopes"],
            "expires_at": until,
            "service_account": self.accounts.get(data["holder"]),
            **self.limits(),
        }


class OverlapForm(forms.Form):
    """How long the old key goes on working."""

    overlap = forms.ChoiceField(choices=list(OVERLAPS.items()))


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
@login_required
@reauthentication_required
def keys(request: HttpRequest) -> HttpResponse:
    """The keys of one of the user's tenants, and what the last POST made; by POST a new key."""
    user: Any = request.user
    form = _form(user, None)
    try:
        tenant = current_tenant(request)
        form = _form(user, tenant)
        if request.method == "POST" and tenant is not None:
            form = _form(user, tenant, request.POST)
            if form.is_valid():
                made = _make(user, tenant, form)
                return redirect_with_message(
                    request, "keys", tenant, made=made.key.pk, secret=made.secret
                )
    except QuireError as error:
        return _page(request, first_tenant(user), form, error=error)
    kept = pop_one_time(request) if request.method == "GET" and tenant is not None else {}
    return _page(request, tenant, form, **_flash_context(user, tenant, kept))


@transaction.atomic
def _make(user: User, tenant: Tenant, form: NewKeyForm) -> actions.NewKey:
    """The key with its budget, or neither."""
    made = actions.create_key(actor=user, tenant=tenant, **form.values())
    if (budget := form.budget()) is not None:
        set_budget(actor=user, tenant=tenant, key=made.key, **budget)
    return made


@require_POST
@never_cache
@login_required
@reauthentication_required
def rotate(request: HttpRequest, pk: int) -> HttpResponse:
    """Another key in this one's place, shown on the page that follows and never again."""

    def deed(user: User, key: ApiKey) -> dict[str, Any]:
        form = OverlapForm(request.POST)
        hours = int(form.cleaned_data["overlap"]) if form.is_valid() else 24
        made = actions.rotate_key(actor=user, key=key, overlap=timedelta(hours=hours))
        return {
            "made": made.key.pk,
            "secret": made.secret,
            "replaced": key.pk,
            "overlap": OVERLAPS[str(hours)],
        }

    return _change(request, pk, deed)


@require_POST
@never_cache
@login_required
def revoke(request: HttpRequest, pk: int) -> HttpResponse:
    """Refuse the key from now on."""
    return _change(
        request, pk, lambda user, key: {"revoked": actions.revoke_key(actor=user, key=key).pk}
    )


def _change(
    request: HttpRequest, pk: int, deed: Callable[[User, ApiKey], dict[str, Any]]
) -> HttpResponse:
    """Do something to one of the user's keys, then send them to the page that says so."""
    user: Any = request.user
    tenant = None
    try:
        tenant = current_tenant(request)
        if tenant is None:
            return _page(request, None, _form(user, None))
        kept = deed(user, access_key(user, tenant, pk))
    except QuireError as error:
        shown = tenant or first_tenant(user)
        return _page(request, shown, _form(user, shown), error=error)
    return redirect_with_message(request, "keys", tenant, **kept)


def _form(user: User, tenant: Tenant | None, data: Any = None) -> NewKeyForm:
    admin = tenant is not None and access_role(user, tenant).rank >= Role.ADMIN.rank
    accounts: list[ServiceAccount] = []
    if tenant is not None and admin:
        accounts = list(access_service_accounts(user, tenant).filter(active=True)[:MAX_ROWS])
    operator = to_actor(user).is_operator
    return NewKeyForm(data, operator=operator, admin=admin, accounts=accounts)


def _flash_context(user: User, tenant: Tenant | None, kept: dict[str, Any]) -> dict[str, Any]:
    """What the page says of what was just done."""
    if tenant is None or kept.get("tenant") != tenant.slug:
        return {}
    named = {name: kept[name] for name in ("made", "replaced", "revoked") if name in kept}
    found = {name: access_key(user, tenant, pk) for name, pk in named.items()}
    return {**found, "secret": kept.get("secret"), "overlap": kept.get("overlap")}


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
        found = list(access_keys(user, tenant)[: MAX_ROWS + 1])
        may_make = access_role(user, tenant).rank >= Role.MEMBER.rank
    context |= {
        **tenant_context(user, tenant),
        "active": [key for key in found[:MAX_ROWS] if key.state() == "active"],
        "ended": [key for key in found[:MAX_ROWS] if key.state() != "active"],
        "more": len(found) > MAX_ROWS,
        "most": MAX_ROWS,
        "may_make": may_make,
        "form": form,
        "error": error,
        "overlaps": OVERLAPS.items(),
    }
    return render(request, "console/keys.html", context, status=error.status if error else 200)
