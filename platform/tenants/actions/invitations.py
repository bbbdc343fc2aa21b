"""Inviting people into a tenant, by a link that is mailed or handed over."""

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
from tenants.actions.keys import end_invitation
from tenants.actions.members import add_member, check_role
from tenants.actions.users import create_user
from tenants.actors import SYSTEM, Actor, as_actor, require_rank
from tenants.audit import record
from tenants.models import Invitation, Role, Tenant, User

LASTS = timedelta(days=7)
TOKEN_BYTES = 32


@dataclass(frozen=True)
class NewInvitation:
    """An invitation that was just made. `token` exists here and in its link, nowhere else."""

    invitation: Invitation
    token: str = field(repr=False)


@transaction.atomic
def invite(
    *, actor: Actor | User, tenant: Tenant, email: str, role: str = Role.MEMBER
) -> NewInvitation:
    """A link that lets somebody in for a week. An earlier one to the same address ends.

    Raises: `NotFound` for strangers, `PermissionDenied` for a role above the actor's own,
    `InvalidRequest` with `param`, `Conflict` for who is a member already.
    """
    actor = as_actor(actor)
    wanted = check_role(role)
    require_rank(actor, tenant, wanted)
    if not tenant.active:
        raise Conflict(f"The tenant {tenant.slug} is disabled.")
    email = User.objects.normalize_email(email)
    if email and tenant.memberships.filter(user__email__iexact=email).exists():
        raise Conflict(f"{email} is a member of {tenant.slug} already.")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    invitation = Invitation(
        tenant=tenant,
        email=email,
        role=wanted,
        digest=_digest(token),
        created_by=actor.user,
        expires_at=timezone.now() + LASTS,
    )
    save_valid(invitation)
    for earlier in _open(tenant, email).exclude(pk=invitation.pk).select_for_update():
        end_invitation(actor, earlier)
    record(
        actor=actor,
        action="invitation.create",
        target=invitation,
        tenant=tenant,
        role=wanted,
        expires_at=invitation.expires_at,
    )
    return NewInvitation(invitation, token)


@transaction.atomic
def revoke_invitation(*, actor: Actor | User, invitation: Invitation) -> Invitation:
    """Let the link in nobody any more. Revoking twice changes nothing."""
    actor = as_actor(actor)
    require_rank(actor, invitation.tenant, Role(invitation.role))
    found = _locked(pk=invitation.pk)
    if found.state() == "open":
        end_invitation(actor, found)
    return found


def find_invitation(token: str) -> Invitation:
    """The open invitation behind a link. Raises `NotFound`, whatever else it is."""
    rows = Invitation.objects.select_related("tenant", "created_by")
    found = rows.filter(digest=_digest(token)).first()
    if found is None or found.state() != "open" or not _still_backed(found):
        raise NotFound("This invitation doesn't exist, was used, or has expired.")
    return found


@transaction.atomic
def accept_invitation(*, user: User, token: str) -> Invitation:
    """Make the person who has the link a member, once.

    Raises: `NotFound`; `Conflict` for who is a member already.
    """
    invitation = _locked(pk=find_invitation(token).pk)
    if invitation.state() != "open":
        raise NotFound("This invitation doesn't exist, was used, or has expired.")
    inviter = Actor(f"invitation by {invitation.created_by or 'a command'}")
    add_member(actor=inviter, tenant=invitation.tenant, user=user, role=invitation.role)
    invitation.accepted_at, invitation.accepted_by = timezone.now(), user
    invitation.save(update_fields=["accepted_at", "accepted_by"])
    record(
        actor=as_actor(user),
        action="invitation.accept",
        target=invitation,
        tenant=invitation.tenant,
        role=invitation.role,
    )
    return invitation


@transaction.atomic
def join_by_invitation(*, token: str, username: str, password: str) -> User:
    """Make a person of whoever has the link, and a member of the tenant.

    Raises: `NotFound`, `InvalidRequest` with `param`, `Conflict` for a name that is taken.
    """
    invitation = find_invitation(token)
    user = create_user(actor=SYSTEM, username=username, email=invitation.email, password=password)
    accept_invitation(user=user, token=token)
    return user


def _still_backed(invitation: Invitation) -> bool:
    """Whether who made it could make it today, and the tenant is on."""
    if not invitation.tenant.active:
        return False
    if invitation.created_by is None:
        return True
    try:
        require_rank(as_actor(invitation.created_by), invitation.tenant, Role(invitation.role))
    except (NotFound, PermissionDenied):
        return False
    return True


def _open(tenant: Tenant, email: str) -> QuerySet[Invitation]:
    return Invitation.objects.filter(
        tenant=tenant, email__iexact=email, accepted_at=None, revoked_at=None
    )


def _locked(pk: int) -> Invitation:
    rows = Invitation.objects.select_for_update(of=("self",)).select_related("tenant", "created_by")
    found = rows.filter(pk=pk).first()
    if found is None:
        raise NotFound("Invitation not found.")
    return found


def _digest(token: str) -> str:
    """The token carries 256 random bits: a fast hash is enough."""
    return hashlib.sha256(token[:200].encode("utf-8", "surrogatepass")).hexdigest()
