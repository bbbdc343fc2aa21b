"""Members of a tenant, their roles, and its service accounts."""

from __future__ import annotations

from functools import partial

from django.db import transaction
from django.db.models.signals import post_delete
from django.dispatch import receiver

from common.db import changed, save_valid
from common.errors import Conflict, NotFound
from engine.contract.errors import InvalidRequest
from tenants.actions.keys import revoke_access, revoke_keys_of_account
from tenants.actors import Actor, require_manager_of, role_in, to_actor
from tenants.audit import log_action
from tenants.models import Membership, Role, ServiceAccount, Tenant, User
from tenants.signals import tenant_changed


def check_role(role: str) -> Role:
    """The role with this name. Raises `InvalidRequest`."""
    if role not in Role.values:
        roles = ", ".join(Role.values)
        raise InvalidRequest(f"{role!r} isn't a role. Roles are {roles}.", param="role")
    return Role(role)


@transaction.atomic
def create_service_account(
    *, actor: Actor | User, tenant: Tenant, name: str, role: str = Role.MEMBER
) -> ServiceAccount:
    """Create a service account, which can hold keys.

    Raises: `NotFound` for non-members, `PermissionDenied` for a role above the actor's own,
    `InvalidRequest` with `param`, `Conflict` for a name that is taken.
    """
    actor = to_actor(actor)
    checked_role = check_role(role)
    require_manager_of(actor, tenant, checked_role)
    account = ServiceAccount(tenant=tenant, name=name, role=checked_role, created_by=actor.user)
    save_valid(account)
    log_action(
        actor,
        "service_account.create",
        account,
        tenant=tenant,
        changes={"name": [None, name], "role": [None, checked_role]},
    )
    return account


@transaction.atomic
def update_service_account(
    *,
    actor: Actor | User,
    account: ServiceAccount,
    name: str | None = None,
    role: str | None = None,
    active: bool | None = None,
) -> ServiceAccount:
    """Change the given fields. The keys of an inactive account are refused within two seconds.

    Raises the errors of `create_service_account`.
    """
    actor = to_actor(actor)
    account = _select_account_for_update(account)
    new_role = Role(account.role) if role is None else check_role(role)
    require_manager_of(
        actor, account.tenant, max(new_role, Role(account.role), key=lambda r: r.rank)
    )
    values = {"name": name, "role": new_role, "active": active}
    difference = changed(account, {k: v for k, v in values.items() if v is not None})
    if difference:
        save_valid(account)
        log_action(
            actor, "service_account.update", account, tenant=account.tenant, changes=difference
        )
        _send_signal_on_commit(account.tenant)
    return account


@transaction.atomic
def retire_service_account(*, actor: Actor | User, account: ServiceAccount) -> ServiceAccount:
    """Deactivate it and revoke its keys for good; the ledger keeps its name."""
    actor = to_actor(actor)
    account = _select_account_for_update(account)
    require_manager_of(actor, account.tenant, Role(account.role))
    revoke_keys_of_account(actor=actor, account=account)
    if account.active:
        account.active = False
        account.save(update_fields=["active"])
        log_action(
            actor,
            "service_account.retire",
            account,
            tenant=account.tenant,
            changes={"active": [True, False]},
        )
        _send_signal_on_commit(account.tenant)
    return account


def _select_account_for_update(account: ServiceAccount) -> ServiceAccount:
    rows = ServiceAccount.objects.select_for_update(of=("self",)).select_related("tenant")
    row = rows.filter(pk=account.pk).first()
    if row is None:
        raise NotFound("Service account not found.")
    return row


def _send_signal_on_commit(tenant: Tenant) -> None:
    transaction.on_commit(partial(tenant_changed.send, sender=Tenant, tenant=tenant))


@transaction.atomic
def add_member(*, actor: Actor | User, tenant: Tenant, user: User, role: str) -> Membership:
    """Raises: `PermissionDenied` for a role above the actor's own, `Conflict` for a member."""
    actor = to_actor(actor)
    checked_role = check_role(role)
    require_manager_of(actor, tenant, checked_role)
    if not user.is_active:
        raise Conflict(f"{user} is deactivated.")
    if role_in(user, tenant) is not None:
        raise Conflict(f"{user} is a member of {tenant.slug} already.")
    membership = Membership.objects.create(tenant=tenant, user=user, role=checked_role)
    log_action(
        actor,
        "member.add",
        membership,
        tenant=tenant,
        user=user.get_username(),
        changes={"role": [None, checked_role]},
    )
    _send_signal_on_commit(tenant)
    return membership


@transaction.atomic
def change_role(*, actor: Actor | User, membership: Membership, role: str) -> Membership:
    """Change a member's role. A lower one ends their sessions, sockets and keys of this tenant.

    Raises: `PermissionDenied` above the actor's own role, `Conflict` for the last owner.
    """
    actor = to_actor(actor)
    new_role = check_role(role)
    membership = _select_for_update(membership)
    previous_role = Role(membership.role)
    require_manager_of(
        actor, membership.tenant, max(new_role, previous_role, key=lambda role: role.rank)
    )
    if previous_role == new_role:
        return membership
    membership.role = new_role
    membership.save(update_fields=["role"])
    if previous_role == Role.OWNER:
        check_last_owner(membership.tenant)
    if new_role.rank < previous_role.rank:
        revoke_access(actor=actor, user=membership.user, tenant=membership.tenant)
    log_action(
        actor,
        "member.change_role",
        membership,
        tenant=membership.tenant,
        changes={"role": [previous_role, new_role]},
    )
    _send_signal_on_commit(membership.tenant)
    return membership


@transaction.atomic
def remove_member(*, actor: Actor | User, membership: Membership) -> None:
    """Remove a member; their sessions and keys of this tenant end. Anyone may remove themselves.

    Raises: `PermissionDenied` above the actor's own role, `Conflict` for the last owner.
    """
    actor = to_actor(actor)
    membership = _select_for_update(membership)
    tenant, user = membership.tenant, membership.user
    if actor.user != user or actor.key is not None:
        require_manager_of(actor, tenant, Role(membership.role))
    revoke_access(actor=actor, user=user, tenant=tenant)
    log_action(
        actor,
        "member.remove",
        membership,
        tenant=tenant,
        user=user.get_username(),
        changes={"role": [membership.role, None]},
    )
    membership.delete()
    _send_signal_on_commit(tenant)


def _select_for_update(membership: Membership) -> Membership:
    """The current row. Locks the tenant's row, too, so that counts of owners are serialized."""
    Tenant.objects.select_for_update().get(pk=membership.tenant_id)
    row = Membership.objects.select_related("tenant", "user").filter(pk=membership.pk).first()
    if row is None:
        raise NotFound("This membership no longer exists.")
    return row


def check_last_owner(tenant: Tenant) -> None:
    """Raise `Conflict` if the preceding change removed the tenant's last active owner.

    Concurrent removals of owners wait for the tenant's row, so that they count after this commit. A
    tenant that is being erased needs no owner.
    """
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    if tenant.erase_requested_at is not None:
        return
    owners = Membership.objects.filter(tenant=tenant, role=Role.OWNER, user__is_active=True)
    if not owners.exists():
        raise Conflict(f"{tenant.slug} needs at least one owner.")


@receiver(post_delete, sender=Membership, dispatch_uid="tenants.keep_an_owner")
def _deleted(instance: Membership, origin: object, **_: object) -> None:
    """Runs however a row is deleted, also with its user's; a deleted tenant needs no owner."""
    is_tenant_deleted = getattr(origin, "model", type(origin)) is Tenant
    if instance.role == Role.OWNER and not is_tenant_deleted:
        check_last_owner(instance.tenant)
