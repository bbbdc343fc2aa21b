"""The page where owners and admins look after their tenant's people and programs.

It works without scripts; each POST answers with a redirect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django import forms
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from console.identity.recent import recent_authentication_required
from console.mail import mail_invitation
from console.tenancy import done, first_tenant, named_tenant, tenant_context
from engine.contract.errors import InvalidRequest, QuireError
from tenants import actions
from tenants.access import (
    access_invitation,
    access_invitations,
    access_member,
    access_members,
    access_role,
    access_service_account,
    access_service_accounts,
)
from tenants.errors import NotFound
from tenants.models import Role, Tenant
from tenants.shown_once import take

#: Rows of each kind that the page shows.
MOST = 500
ROLE_WORDS = {
    Role.OWNER: "owner: everything",
    Role.ADMIN: "admin: keys, members, the audit log",
    Role.MEMBER: "member: asks models, makes keys of their own",
    Role.VIEWER: "viewer: looks at models and usage",
}
Deed = Callable[..., dict[str, Any]]


class InviteForm(forms.Form):
    """Whom to invite."""

    email = forms.EmailField(max_length=254)


class AccountForm(forms.Form):
    """A new service account."""

    name = forms.CharField(max_length=100)


@require_safe
@never_cache
@login_required
def members(request: HttpRequest) -> HttpResponse:
    """The members of one of the user's tenants; for admins also invitations and programs."""
    try:
        tenant = named_tenant(request)
    except QuireError as error:
        return _page(request, None, error=error)
    kept = take(request) if request.method == "GET" and tenant is not None else {}
    told = kept if tenant is not None and kept.get("tenant") == tenant.slug else {}
    return _page(request, tenant, told=told)


def deed(function: Deed) -> Callable[..., HttpResponse]:
    """A view by POST that does something in the tenant, then shows the page that says so."""

    @require_POST
    @never_cache
    @login_required
    @wraps(function)
    def view(request: HttpRequest, **where: Any) -> HttpResponse:
        tenant = None
        try:
            tenant = named_tenant(request)
            if tenant is None:
                raise NotFound("You belong to no tenant.")
            return done(request, "members", tenant, **function(request, tenant, **where))
        except QuireError as error:
            return _page(request, tenant, error=error)

    return view


@recent_authentication_required
@deed
def invite(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """A link for somebody; mailed where mail is set up, and shown once in any case."""
    email = _checked(InviteForm(request.POST))["email"]
    role = request.POST.get("role", "")
    made = actions.invite(actor=request.user, tenant=tenant, email=email, role=role)
    link = request.build_absolute_uri(reverse("invitation", args=[made.token]))
    mailed = mail_invitation(made.invitation, link)
    return {"invited": email, "link": link, "mailed": mailed}


@deed
def revoke(request: HttpRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    """End an invitation."""
    found = access_invitation(request.user, tenant, pk)
    actions.revoke_invitation(actor=request.user, invitation=found)
    return {"text": f"The invitation of {found.email} has ended."}


@recent_authentication_required
@deed
def change_role(request: HttpRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    """Another role; a lower one ends the member's sessions and keys."""
    found = access_member(request.user, tenant, pk)
    role = request.POST.get("role", "")
    changed = actions.change_role(actor=request.user, membership=found, role=role)
    return {"text": f"{changed.user} is {changed.get_role_display().lower()} now."}


@recent_authentication_required
@deed
def remove(request: HttpRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    """Out of the tenant, with their keys."""
    found = access_member(request.user, tenant, pk)
    actions.remove_member(actor=request.user, membership=found)
    return {"text": f"{found.user} is no member any more; their keys here are revoked."}


@deed
def add_account(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """A program of the tenant's."""
    name = _checked(AccountForm(request.POST))["name"]
    role = request.POST.get("role", "")
    account = actions.create_service_account(
        actor=request.user, tenant=tenant, name=name, role=role
    )
    return {"text": f"{account} is there: make keys for it on the page of API keys."}


@recent_authentication_required
@deed
def retire_account(request: HttpRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    """Switch a program off and revoke its keys."""
    account = access_service_account(request.user, tenant, pk)
    actions.retire_service_account(actor=request.user, account=account)
    return {"text": f"{account} is switched off; its keys are revoked."}


def _checked(form: forms.Form) -> dict[str, Any]:
    """What the form holds. Raises `InvalidRequest` with the first thing that's wrong."""
    if not form.is_valid():
        field, problems = next(iter(form.errors.items()))
        raise InvalidRequest(f"{field}: {problems[0]}", param=field)
    return form.cleaned_data


def _page(
    request: HttpRequest,
    tenant: Tenant | None,
    *,
    told: dict[str, Any] | None = None,
    error: QuireError | None = None,
) -> HttpResponse:
    user: Any = request.user
    if tenant is None:
        tenant = first_tenant(user)
    context: dict[str, Any] = {**tenant_context(user, tenant), "told": told, "error": error}
    if tenant is not None:
        role = access_role(user, tenant)
        manages = role.rank >= Role.ADMIN.rank
        context |= {
            "members": access_members(user, tenant)[:MOST],
            "accounts": access_service_accounts(user, tenant).filter(active=True)[:MOST],
            "manages": manages,
            "own_rank": role.rank,
            "roles": [(r.value, ROLE_WORDS[r]) for r in Role if r.rank <= role.rank],
            "most": MOST,
        }
        if manages:
            rows = access_invitations(user, tenant)[:MOST]
            context["invitations"] = [row for row in rows if row.state() == "open"]
    return render(request, "console/members.html", context, status=error.status if error else 200)
