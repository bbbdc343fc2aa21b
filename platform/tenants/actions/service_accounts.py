"""Programs of a tenant, whose keys are no person's."""

from __future__ import annotations

from functools import partial

from django.db import transaction

from tenants.actions.keys import revoke_keys_of_account
from tenants.actions.roles import check_role
from tenants.actors import Actor, as_actor, require_rank
from tenants.audit import record
from tenants.errors import NotFound
from tenants.events import tenant_changed
from tenants.models import Role, ServiceAccount, Tenant, User
from tenants.validation import changed, save_valid


@transaction.atomic
def create_service_account(
    *, actor: Actor | User, tenant: Tenant, name: str, role: str = Role.MEMBER
) -> ServiceAccount:
    """A program that keys can be made for.

    Raises: `NotFound` for strangers, `PermissionDenied` for a role above the actor's own,
    `InvalidRequest` with `param`, `Conflict` for a name that is taken.
    """
    actor = as_actor(actor)
    wanted = check_role(role)
    require_rank(actor, tenant, wanted)
    account = ServiceAccount(tenant=tenant, name=name, role=wanted, created_by=actor.user)
    save_valid(account)
    record(
        actor=actor,
        action="service_account.create",
        target=account,
        tenant=tenant,
        changes={"name": [None, name], "role": [None, wanted]},
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
    """Change what is named. Switched off, its keys are refused within two seconds.

    Raises: what `create_service_account` raises.
    """
    actor = as_actor(actor)
    account = _locked(account)
    wanted = Role(account.role) if role is None else check_role(role)
    require_rank(actor, account.tenant, max(wanted, Role(account.role), key=lambda r: r.rank))
    given = {"name": name, "role": wanted, "active": active}
    difference = changed(account, {k: v for k, v in given.items() if v is not None})
    if difference:
        save_valid(account)
        record(
            actor=actor,
            action="service_account.update",
            target=account,
            tenant=account.tenant,
            changes=difference,
        )
        _announce(account.tenant)
    return account


@transaction.atomic
def retire_service_account(*, actor: Actor | User, account: ServiceAccount) -> ServiceAccount:
    """Switch it off and revoke its keys for good; the ledger goes on naming them."""
    actor = as_actor(actor)
    account = _locked(account)
    require_rank(actor, account.tenant, Role(account.role))
    revoke_keys_of_account(actor=actor, account=account)
    if account.active:
        account.active = False
        account.save(update_fields=["active"])
        record(
            actor=actor,
            action="service_account.retire",
            target=account,
            tenant=account.tenant,
            changes={"active": [True, False]},
        )
        _announce(account.tenant)
    return account


def _locked(account: ServiceAccount) -> ServiceAccount:
    rows = ServiceAccount.objects.select_for_update(of=("self",)).select_related("tenant")
    found = rows.filter(pk=account.pk).first()
    if found is None:
        raise NotFound("Service account not found.")
    return found


def _announce(tenant: Tenant) -> None:
    transaction.on_commit(partial(tenant_changed.send, sender=Tenant, tenant=tenant))
