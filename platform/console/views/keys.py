"""The page to create, rotate and revoke API keys. It works without scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from django import forms
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone

from common.one_time import pop_one_time
from console.views.base import (
    change_view,
    current_tenant,
    form_view,
    redirect_with_message,
    tenant_context,
)
from engine.contract.errors import QuireError
from metering.actions import set_budget
from metering.models import Period
from tenants import actions, api_keys
from tenants.access import (
    access_key,
    access_keys,
    access_role,
    access_service_accounts,
    first_tenant,
)
from tenants.actors import to_actor
from tenants.models import ApiKey, Role, ServiceAccount, Tenant, User
from tenants.sessions import UserRequest

#: Integer limits of a key -> label in the form.
AMOUNTS = {
    "requests_per_minute": "Requests per minute",
    "tokens_per_minute": "Tokens per minute",
    "media_per_minute": "Images, videos, documents and audio files per minute",
    "media_bytes_per_minute": "Bytes of such files per minute",
    "media_seconds_per_minute": "Seconds of decoding them per minute",
    "max_running_requests": "Requests at a time",
    "max_context_tokens": "Tokens in one request, prompt and answer",
}
#: List limits of a key -> label and example in the form.
LISTS = {
    "allowed_models": ("Models", "small, large"),
    "endpoints": ("Paths", "/v1/embeddings"),
    "addresses": ("Addresses and networks", "10.0.0.0/8"),
}


class WordsField(forms.CharField):
    """A list of words separated by commas or newlines."""

    def clean(self, value: Any) -> list[str]:
        """Split the text; empty gives an empty list."""
        text = super().clean(value).replace("\n", ",")
        return [word.strip() for word in text.split(",") if word.strip()]


class LimitsForm(forms.Form):
    """Limits of a key; for an empty field only the tenant's limit applies."""

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
        """Arguments for `create_key`: only the fields that are filled in."""
        data = self.cleaned_data
        return {name: data[name] for name in (*AMOUNTS, *LISTS) if data[name]}

    def budget(self) -> dict[str, Any] | None:
        """Arguments for `set_budget`; None without a spending limit."""
        data = self.cleaned_data
        if data["spending"] is None:
            return None
        return {
            "amount": data["spending"],
            "period": data["spending_period"] or Period.MONTH,
        }

    def narrowing(self) -> list[forms.BoundField]:
        """The bound fields of the limits, for the template."""
        return [self[name] for name in (*LISTS, *AMOUNTS, "spending", "spending_period")]

    def narrows(self) -> bool:
        """Whether the submitted form sets a limit, so that the section is shown open."""
        return self.is_bound and any(self.data.get(name) for name in (*LISTS, *AMOUNTS, "spending"))


#: Maximum number of rows on the page, newest first.
MAX_ROWS = 200
#: Descriptions of scopes, in the order of the form.
SCOPE_WORDS = {
    api_keys.INFERENCE: "use models",
    api_keys.MODELS: "list models",
    api_keys.USAGE: "read the tenant's usage",
    api_keys.TENANT_ADMIN: "manage members, keys and service accounts of the tenant",
    api_keys.OPERATOR: "operate the installation: caches, load, all tenants",
}
LIFETIMES = {"": "never", "30": "in 30 days", "90": "in 90 days", "365": "in a year"}
#: Hours that a rotated key stays valid -> label in the form.
OVERLAPS = {"24": "for a day", "168": "for a week", "1": "for an hour", "0": "no longer"}


class NewKeyForm(LimitsForm):
    """Name, scopes, lifetime, holder and limits of a new key."""

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
        offered = api_keys.ALL if operator else api_keys.DEFAULT
        if admin:
            offered |= {api_keys.TENANT_ADMIN}
        choices = [
            (name, f"{word} ({name})") for name, word in SCOPE_WORDS.items() if name in offered
        ]
        field: Any = self.fields["scopes"]
        field.choices, field.initial = choices, sorted(api_keys.DEFAULT)

    def values(self) -> dict[str, Any]:
        """Arguments for `create_key`."""
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
    """The time for which the old key stays valid."""

    overlap = forms.ChoiceField(choices=list(OVERLAPS.items()))


@form_view
def keys(request: UserRequest) -> HttpResponse:
    """List the keys of one of the user's tenants; POST creates one."""
    user = request.user
    form = _form(user, None)
    try:
        tenant = current_tenant(request)
        form = _form(user, tenant)
        if request.method == "POST" and tenant is not None:
            form = _form(user, tenant, request.POST)
            if form.is_valid():
                created = _create_key(user, tenant, form)
                return redirect_with_message(
                    request, "keys", tenant, made=created.key.pk, secret=created.secret
                )
    except QuireError as error:
        return _page(request, first_tenant(user), form, error=error)
    outcome = pop_one_time(request) if request.method == "GET" and tenant is not None else {}
    return _page(request, tenant, form, **_flash_context(user, tenant, outcome))


@transaction.atomic
def _create_key(user: User, tenant: Tenant, form: NewKeyForm) -> actions.NewKey:
    """Create the key and its budget in one transaction."""
    created = actions.create_key(actor=user, tenant=tenant, **form.values())
    if (budget := form.budget()) is not None:
        set_budget(actor=user, tenant=tenant, key=created.key, **budget)
    return created


@change_view
def rotate(request: UserRequest, pk: int) -> HttpResponse:
    """Replace a key; the new secret is shown once on the next page."""

    def replace_key(user: User, key: ApiKey) -> dict[str, Any]:
        form = OverlapForm(request.POST)
        hours = int(form.cleaned_data["overlap"]) if form.is_valid() else 24
        created = actions.rotate_key(actor=user, key=key, overlap=timedelta(hours=hours))
        return {
            "made": created.key.pk,
            "secret": created.secret,
            "replaced": key.pk,
            "overlap": OVERLAPS[str(hours)],
        }

    return _change(request, pk, replace_key)


@change_view
def revoke(request: UserRequest, pk: int) -> HttpResponse:
    return _change(
        request, pk, lambda user, key: {"revoked": actions.revoke_key(actor=user, key=key).pk}
    )


def _change(
    request: UserRequest, pk: int, action: Callable[[User, ApiKey], dict[str, Any]]
) -> HttpResponse:
    """Apply an action to one of the user's keys, then redirect to the page with its outcome."""
    user = request.user
    tenant = None
    try:
        tenant = current_tenant(request)
        if tenant is None:
            return _page(request, None, _form(user, None))
        outcome = action(user, access_key(user, tenant, pk))
    except QuireError as error:
        fallback_tenant = tenant or first_tenant(user)
        return _page(request, fallback_tenant, _form(user, fallback_tenant), error=error)
    return redirect_with_message(request, "keys", tenant, **outcome)


def _form(user: User, tenant: Tenant | None, data: Any = None) -> NewKeyForm:
    admin = tenant is not None and access_role(user, tenant).rank >= Role.ADMIN.rank
    accounts: list[ServiceAccount] = []
    if tenant is not None and admin:
        accounts = list(access_service_accounts(user, tenant).filter(active=True)[:MAX_ROWS])
    operator = to_actor(user).is_operator
    return NewKeyForm(data, operator=operator, admin=admin, accounts=accounts)


def _flash_context(user: User, tenant: Tenant | None, outcome: dict[str, Any]) -> dict[str, Any]:
    """Template context of the last action's outcome."""
    if tenant is None or outcome.get("tenant") != tenant.slug:
        return {}
    affected: dict[str, Any] = {
        name: access_key(user, tenant, outcome[name])
        for name in ("made", "replaced", "revoked")
        if name in outcome
    }
    return {**affected, "secret": outcome.get("secret"), "overlap": outcome.get("overlap")}


def _page(
    request: UserRequest,
    tenant: Tenant | None,
    form: NewKeyForm,
    *,
    error: QuireError | None = None,
    **context: Any,
) -> HttpResponse:
    user = request.user
    rows: list[ApiKey] = []
    may_create = False
    if tenant is not None:
        rows = list(access_keys(user, tenant)[: MAX_ROWS + 1])
        may_create = access_role(user, tenant).rank >= Role.MEMBER.rank
    context |= {
        **tenant_context(user, tenant),
        "active": [key for key in rows[:MAX_ROWS] if key.state() == "active"],
        "ended": [key for key in rows[:MAX_ROWS] if key.state() != "active"],
        "more": len(rows) > MAX_ROWS,
        "most": MAX_ROWS,
        "may_make": may_create,
        "form": form,
        "error": error,
        "overlaps": OVERLAPS.items(),
    }
    return render(request, "console/keys.html", context, status=error.status if error else 200)
