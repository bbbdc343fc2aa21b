"""Who belongs to a tenant, and as what."""

from functools import partial

from django.db import transaction

from engine.errors import InvalidRequest
from tenants.actions.keys import revoke_keys_of
from tenants.actors import Actor, as_actor, require_role, role_in
from tenants.audit import record
from tenants.errors import Conflict, NotFound, PermissionDenied
from tenants.events import tenant_changed
from tenants.models import Membership, Role, Tenant, User


@transaction.atomic
def add_member(*, actor: Actor | User, tenant: Tenant, user: User, role: str) -> Membership:
    """Raises: `PermissionDenied` for a role above the actor's own, `Conflict` for a member."""
    actor = as_actor(actor)
    wanted = _check_role(role)
    _require_rank(actor, tenant, wanted)
    if role_in(user, tenant) is not None:
        raise Conflict(f"{user} is a member of {tenant.slug} already.")
    membership = Membership.objects.create(tenant=tenant, user=user, role=wanted)
    record(
        actor=actor,
        action="member.add",
        target=membership,
        tenant=tenant,
        user=user.get_username(),
        role=wanted,
    )
    _announce(tenant)
    return membership


@transaction.atomic
def change_role(*, actor: Actor | User, membership: Membership, role: str) -> Membership:
    """Raises: `PermissionDenied` above the actor's own role, `Conflict` for the last owner."""
    actor = as_actor(actor)
    wanted = _check_role(role)
    membership = _locked(membership)
    before = Role(membership.role)
    _require_rank(actor, membership.tenant, max(wanted, before, key=lambda role: role.rank))
    if before == wanted:
        return membership
    if before == Role.OWNER:
        _keep_an_owner(membership)
    membership.role = wanted
    membership.save(update_fields=["role"])
    record(
        actor=actor,
        action="member.change_role",
        target=membership,
        tenant=membership.tenant,
        changes={"role": [before, wanted]},
    )
    _announce(membership.tenant)
    return membership


@transaction.atomic
def remove_member(*, actor: Actor | User, membership: Membership) -> None:
    """Anyone may leave; others need the rank. The keys that the member made are revoked."""
    actor = as_actor(actor)
    membership = _locked(membership)
    tenant, user = membership.tenant, membership.user
    if actor.user != user:
        _require_rank(actor, tenant, Role(membership.role))
    if membership.role == Role.OWNER:
        _keep_an_owner(membership)
    revoke_keys_of(actor=actor, tenant=tenant, user=user)
    record(
        actor=actor,
        action="member.remove",
        target=membership,
        tenant=tenant,
        user=user.get_username(),
        role=membership.role,
    )
    membership.delete()
    _announce(tenant)


def _check_role(role: str) -> Role:
    if role not in Role.values:
        known = ", ".join(Role.values)
        raise InvalidRequest(f"{role!r} is no role; there are {known}.", param="role")
    return Role(role)


def _locked(membership: Membership) -> Membership:
    """The row as it is now. The tenant's row is locked too, so that owners are counted in turn."""
    Tenant.objects.select_for_update().get(pk=membership.tenant_id)
    found = Membership.objects.select_related("tenant", "user").filter(pk=membership.pk).first()
    if found is None:
        raise NotFound("This membership is gone.")
    return found


def _require_rank(actor: Actor, tenant: Tenant, role: Role) -> None:
    """Admins manage members up to their own role, owners all."""
    require_role(actor, tenant, Role.ADMIN)
    if actor.is_operator:
        return
    own = role_in(actor.user, tenant)
    if own is None or own.rank < role.rank:
        raise PermissionDenied("You can't manage a role above your own.")


def _keep_an_owner(membership: Membership) -> None:
    others = Membership.objects.filter(tenant=membership.tenant, role=Role.OWNER)
    if not others.exclude(pk=membership.pk).exists():
        raise Conflict(f"{membership.tenant.slug} needs at least one owner.")


def _announce(tenant: Tenant) -> None:
    transaction.on_commit(partial(tenant_changed.send, sender=Tenant, tenant=tenant))
