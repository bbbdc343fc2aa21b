"""Inviting people to a tenant by a link that is mailed or passed on."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from datetime import timedelta

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from common.db import save_valid
from common.errors import Conflict, NotFound, PermissionDenied
from tenants.actions.keys import revoke_invitation_of
from tenants.actions.members import add_member, check_role
from tenants.actions.users import create_user
from tenants.actors import SYSTEM_ACTOR, Actor, require_manager_of, to_actor
from tenants.audit import log_action
from tenants.models import Invitation, Role, Tenant, User

INVITATION_TTL = timedelta(days=7)
TOKEN_BYTES = 32


@dataclass(frozen=True)
class NewInvitation:
    """A new invitation. `token` isn't stored: only this object and the link contain it."""

    invitation: Invitation
    token: str = field(repr=False)


@transaction.atomic
def invite(
    *, actor: Actor | User, tenant: Tenant, email: str, role: str = Role.MEMBER
) -> NewInvitation:
    """Create a link to join a tenant, valid for a week; replaces one to the same address.

    Raises: `NotFound` for non-members, `PermissionDenied` for a role above the actor's own,
    `InvalidRequest` with `param`, `Conflict` for someone who is a member already.
    """
    actor = to_actor(actor)
    new_role = check_role(role)
    require_manager_of(actor, tenant, new_role)
    if not tenant.active:
        raise Conflict(f"The tenant {tenant.slug} is disabled.")
    email = User.objects.normalize_email(email)
    if email and tenant.memberships.filter(user__email__iexact=email).exists():
        raise Conflict(f"{email} is a member of {tenant.slug} already.")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    invitation = Invitation(
        tenant=tenant,
        email=email,
        role=new_role,
        digest=_digest(token),
        created_by=actor.user,
        expires_at=timezone.now() + INVITATION_TTL,
    )
    save_valid(invitation)
    for earlier in _open(tenant, email).exclude(pk=invitation.pk).select_for_update():
        revoke_invitation_of(actor, earlier)
    log_action(
        actor,
        "invitation.create",
        invitation,
        tenant=tenant,
        role=new_role,
        expires_at=invitation.expires_at,
    )
    return NewInvitation(invitation, token)


@transaction.atomic
def revoke_invitation(*, actor: Actor | User, invitation: Invitation) -> Invitation:
    """Revoke an invitation's link. Revoking twice changes nothing."""
    actor = require_manager_of(actor, invitation.tenant, Role(invitation.role))
    row = _locked(pk=invitation.pk)
    if row.state() == "open":
        revoke_invitation_of(actor, row)
    return row


def get_open_invitation(token: str) -> Invitation:
    """The open invitation behind a link. Raises `NotFound` for any other state."""
    rows = Invitation.objects.select_related("tenant", "created_by")
    invitation = rows.filter(digest=_digest(token)).first()
    if invitation is None or invitation.state() != "open" or not _is_inviter_authorized(invitation):
        raise NotFound("This invitation doesn't exist, was used, or has expired.")
    return invitation


@transaction.atomic
def accept_invitation(*, user: User, token: str) -> Invitation:
    """Make the user who has the link a member, once.

    Raises: `NotFound`; `Conflict` for someone who is a member already.
    """
    invitation = _locked(pk=get_open_invitation(token).pk)
    if invitation.state() != "open":
        raise NotFound("This invitation doesn't exist, was used, or has expired.")
    inviter = Actor(f"invitation by {invitation.created_by or 'a command'}")
    add_member(actor=inviter, tenant=invitation.tenant, user=user, role=invitation.role)
    invitation.accepted_at, invitation.accepted_by = timezone.now(), user
    invitation.save(update_fields=["accepted_at", "accepted_by"])
    log_action(
        to_actor(user),
        "invitation.accept",
        invitation,
        tenant=invitation.tenant,
        role=invitation.role,
    )
    return invitation


@transaction.atomic
def sign_up_with_invitation(*, token: str, username: str, password: str) -> User:
    """Create a user for the link and make them a member of the tenant.

    Raises: `NotFound`, `InvalidRequest` with `param`, `Conflict` for a name that is taken.
    """
    invitation = get_open_invitation(token)
    user = create_user(
        actor=SYSTEM_ACTOR, username=username, email=invitation.email, password=password
    )
    accept_invitation(user=user, token=token)
    return user


def _is_inviter_authorized(invitation: Invitation) -> bool:
    """Whether its creator could still create it, and the tenant is active."""
    if not invitation.tenant.active:
        return False
    if invitation.created_by is None:
        return True
    try:
        require_manager_of(
            to_actor(invitation.created_by), invitation.tenant, Role(invitation.role)
        )
    except (NotFound, PermissionDenied):
        return False
    return True


def _open(tenant: Tenant, email: str) -> QuerySet[Invitation]:
    return Invitation.objects.filter(
        tenant=tenant, email__iexact=email, accepted_at=None, revoked_at=None
    )


def _locked(pk: int) -> Invitation:
    rows = Invitation.objects.select_for_update(of=("self",)).select_related("tenant", "created_by")
    row = rows.filter(pk=pk).first()
    if row is None:
        raise NotFound("Invitation not found.")
    return row


def _digest(token: str) -> str:
    """The token carries 256 random bits: a fast hash is enough."""
    return hashlib.sha256(token[:200].encode("utf-8", "surrogatepass")).hexdigest()
