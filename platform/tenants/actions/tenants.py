"""Creating and changing tenants."""

from functools import partial
from typing import Any

from django.db import transaction
from django.utils.text import slugify

from engine.contract.errors import InvalidRequest
from tenants.actors import Actor, as_actor, require_operator, require_role
from tenants.audit import record
from tenants.errors import Conflict
from tenants.events import tenant_changed
from tenants.kv_shares import check_kv_shares
from tenants.models import Membership, Role, Tenant, User
from tenants.models.tenant import new_salt
from tenants.validation import changed, save_valid

#: What the operator sets; a tenant's own admins may change its name, its owners `OWN`.
LIMITS = (
    "weight",
    "kv_reserved_fraction",
    "kv_max_fraction",
    "max_priority",
    "requests_per_minute",
    "tokens_per_minute",
    "max_running_requests",
    "max_context_tokens",
    "allowed_models",
    "time_zone",
    "keep_usage_days",
)
#: What its owners decide.
OWN = ("keep_content_days", "keep_conversations", "store_prompts")


@transaction.atomic
def create_tenant(
    *,
    actor: Actor | User,
    name: str,
    slug: str = "",
    owner: User | None = None,
    **limits: Any,
) -> Tenant:
    """A new tenant; `slug` comes from the name when it's left out.

    Raises: `PermissionDenied`, `InvalidRequest` (with `param`), `Conflict` when the slug is taken.
    """
    actor = as_actor(actor)
    require_operator(actor)
    if unknown := set(limits).difference(LIMITS, OWN):
        raise InvalidRequest(
            f"Unknown tenant setting {sorted(unknown)[0]!r}.", param=sorted(unknown)[0]
        )
    slug = slug or slugify(name)[:63]
    if name and not slug:
        raise InvalidRequest(
            f"No short name can be made from {name!r}: give one as slug.", param="slug"
        )
    tenant = Tenant(name=name, slug=slug, **limits)
    save_valid(tenant)
    check_kv_shares(tenant)
    if owner is not None:
        Membership.objects.create(tenant=tenant, user=owner, role=Role.OWNER)
    record(
        actor=actor,
        action="tenant.create",
        target=tenant,
        tenant=tenant,
        owner=owner.get_username() if owner else None,
        **limits,
    )
    return tenant


@transaction.atomic
def update_tenant(*, actor: Actor | User, tenant: Tenant, **changes: Any) -> Tenant:
    """Change a tenant's name (its admins), how long it keeps content (owners), or its limits.

    Raises: `NotFound`, `PermissionDenied`, `InvalidRequest` with `param`.
    """
    actor = as_actor(actor)
    if unknown := set(changes).difference(LIMITS, OWN, {"name"}):
        raise InvalidRequest(f"{sorted(unknown)[0]} can't be changed.", param=sorted(unknown)[0])
    require_role(actor, tenant, Role.OWNER if set(changes) & set(OWN) else Role.ADMIN)
    if set(changes).intersection(LIMITS):
        require_operator(actor)
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    difference = changed(tenant, changes)
    if difference:
        save_valid(tenant)
        if {"kv_reserved_fraction", "kv_max_fraction"} & set(difference):
            check_kv_shares(tenant)
        record(
            actor=actor, action="tenant.update", target=tenant, tenant=tenant, changes=difference
        )
        _announce(tenant)
    return tenant


@transaction.atomic
def set_tenant_active(*, actor: Actor | User, tenant: Tenant, active: bool) -> Tenant:
    """Let a tenant in, or refuse its keys and members within seconds.

    Raises: `PermissionDenied`; `Conflict` for one that is erased.
    """
    actor = as_actor(actor)
    require_operator(actor)
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    if active and tenant.erase_requested_at is not None:
        raise Conflict("This tenant is erased.")
    if tenant.active != active:
        tenant.active = active
        tenant.save(update_fields=["active"])
        if active:
            check_kv_shares(tenant)
        verb = "tenant.activate" if active else "tenant.deactivate"
        record(actor=actor, action=verb, target=tenant, tenant=tenant)
        _announce(tenant)
    return tenant


@transaction.atomic
def rotate_cache_salt(*, actor: Actor | User, tenant: Tenant) -> Tenant:
    """Give the tenant a new cache namespace: what it cached before is never hit again."""
    actor = as_actor(actor)
    require_role(actor, tenant, Role.OWNER)
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    tenant.salt = new_salt()
    tenant.save(update_fields=["salt"])
    record(actor=actor, action="tenant.rotate_cache_salt", target=tenant, tenant=tenant)
    _announce(tenant)
    return tenant


def _announce(tenant: Tenant) -> None:
    """Tell this process once the change is committed."""
    transaction.on_commit(partial(tenant_changed.send, sender=Tenant, tenant=tenant))
