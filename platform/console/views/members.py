"""The members page: a tenant's members, invitations and service accounts.

It works without scripts; each POST responds with a redirect.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.urls import reverse

from accounts.invitation_mail import mail_invitation
from console.views.base import TenantPage, cleaned_or_400
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
from tenants.models import Role, Tenant
from tenants.sessions import UserRequest

#: Maximum number of rows of each kind on the page.
MAX_ROWS = 500
ROLE_WORDS = {
    Role.OWNER: "owner: everything",
    Role.ADMIN: "admin: keys, members, the audit log",
    Role.MEMBER: "member: uses models, creates own keys",
    Role.VIEWER: "viewer: sees models and usage",
}


class InviteForm(forms.Form):
    """Email address to invite."""

    email = forms.EmailField(max_length=254)


class AccountForm(forms.Form):
    """A new service account."""

    name = forms.CharField(max_length=100)


def _context(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    user = request.user
    role = access_role(user, tenant)
    manages = role.rank >= Role.ADMIN.rank
    context = {
        "members": access_members(user, tenant)[:MAX_ROWS],
        "accounts": access_service_accounts(user, tenant).filter(active=True)[:MAX_ROWS],
        "manages": manages,
        "own_rank": role.rank,
        "roles": [(r.value, ROLE_WORDS[r]) for r in Role if r.rank <= role.rank],
        "most": MAX_ROWS,
    }
    if manages:
        rows = access_invitations(user, tenant)[:MAX_ROWS]
        context["invitations"] = [row for row in rows if row.state() == "open"]
    return context


members = TenantPage("members", "members", _context)


@members.action
def invite(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    """Create an invitation link, shown once and mailed if mail is configured."""
    email = cleaned_or_400(InviteForm(request.POST))["email"]
    role = request.POST.get("role", "")
    created = actions.invite(actor=request.user, tenant=tenant, email=email, role=role)
    link = request.build_absolute_uri(reverse("invitation", args=[created.token]))
    mailed = mail_invitation(created.invitation, link)
    return {"invited": email, "link": link, "mailed": mailed}


@members.action
def revoke(request: UserRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    invitation = access_invitation(request.user, tenant, pk)
    actions.revoke_invitation(actor=request.user, invitation=invitation)
    return {"text": f"Invitation for {invitation.email} revoked."}


@members.action
def change_role(request: UserRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    """Change a member's role; a lower one ends their sessions and revokes their keys."""
    membership = access_member(request.user, tenant, pk)
    role = request.POST.get("role", "")
    changed = actions.change_role(actor=request.user, membership=membership, role=role)
    return {"text": f"{changed.user} is {changed.get_role_display().lower()} now."}


@members.action
def remove(request: UserRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    """Remove a member and revoke their keys in the tenant."""
    membership = access_member(request.user, tenant, pk)
    actions.remove_member(actor=request.user, membership=membership)
    return {
        "text": f"{membership.user} is no longer a member; their keys in this tenant are revoked."
    }


@members.action
def add_account(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    """Create a service account."""
    name = cleaned_or_400(AccountForm(request.POST))["name"]
    role = request.POST.get("role", "")
    account = actions.create_service_account(
        actor=request.user, tenant=tenant, name=name, role=role
    )
    return {"text": f"{account} is added: create keys for it on the page API keys."}


@members.action
def retire_account(request: UserRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    """Deactivate a service account and revoke its keys."""
    account = access_service_account(request.user, tenant, pk)
    actions.retire_service_account(actor=request.user, account=account)
    return {"text": f"Service account {account} deactivated; its keys are revoked."}
