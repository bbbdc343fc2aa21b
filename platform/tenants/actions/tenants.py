"""Creating, changing and erasing tenants."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.utils.text import slugify

from common.db import changed, save_valid
from common.errors import Conflict, PermissionDenied
from common.task_queue import send_task_best_effort
from engine.contract.errors import InvalidRequest
from tenants.actions.keys import revoke_access
from tenants.actors import SYSTEM_ACTOR, Actor, require_operator, require_role, to_actor
from tenants.audit import log_action
from tenants.models import Membership, Role, Tenant, User, new_salt
from tenants.signals import tenant_changed
from tenants.tenant_data import data_kinds

ERASE = "tenants.erase"
#: Requests that run while a tenant is erased still report usage, which is erased for this long.
RECHECK_PERIOD = timedelta(days=1)


@transaction.atomic
def log_export(*, actor: Actor | User, tenant: Tenant) -> None:
    """Record an export of all of a tenant's data; `tenants.tenant_data` writes the archive.

    Raises: `NotFound`, `PermissionDenied` unless the actor is an owner in person or an operator.
    """
    actor = _owner(actor, tenant)
    log_action(actor, "tenant.export", tenant, tenant=tenant)


@transaction.atomic
def erase_tenant(*, actor: Actor | User, tenant: Tenant, confirm: str) -> Tenant:
    """Deactivate a tenant at once, and have workers erase all its data permanently.

    The audit log stays, with an anonymous row that it refers to. Users stay: they belong to no
    tenant.

    Args:
        confirm: the tenant's slug, to prevent mistakes.

    Raises: the errors of `log_export`; `InvalidRequest` with `param`.
    """
    actor = _owner(actor, tenant)
    if confirm != tenant.slug:
        raise InvalidRequest(f"Type the tenant's short name, {tenant.slug}.", param="confirm")
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    if tenant.erase_requested_at is None:
        log_action(actor, "tenant.erase", tenant, tenant=tenant)
        for member in Membership.objects.filter(tenant=tenant).select_related("user"):
            revoke_access(actor=actor, user=member.user, tenant=tenant)
        tenant.active, tenant.erase_requested_at = False, timezone.now()
        tenant.save(update_fields=["active", "erase_requested_at"])
        transaction.on_commit(partial(tenant_changed.send, sender=Tenant, tenant=tenant))
        transaction.on_commit(partial(send_task_best_effort, ERASE, tenant.pk))
    return tenant


def erase_tenant_data(*, tenant: Tenant) -> dict[str, int]:
    """Erase the data of a tenant marked for erasure; returns counts by kind. May block.

    If a worker dies before the end, another one resumes.
    """
    removed = {
        kind.name: count for kind in data_kinds() if kind.erase and (count := kind.erase(tenant))
    }
    with transaction.atomic():
        row = Tenant.objects.select_for_update().get(pk=tenant.pk)
        if row.erased_at is None:
            row.slug, row.name = f"erased-{row.pk}", "Erased"
            row.salt, row.erased_at = new_salt(), timezone.now()
            row.keep_content_days = row.keep_usage_days = None
            row.store_prompts = False
            row.allowed_models = []
            row.save()
        if removed:
            log_action(SYSTEM_ACTOR, "tenant.remove_data", row, tenant=row, **removed)
    return removed


def run_pending_erasures() -> int:
    """Erase remaining data of tenants marked for erasure; returns the number of rows."""
    late = timezone.now() - RECHECK_PERIOD
    waiting = Tenant.objects.exclude(erase_requested_at=None).exclude(erased_at__lt=late)
    return sum(sum(erase_tenant_data(tenant=tenant).values()) for tenant in waiting)


def _owner(actor: Actor | User, tenant: Tenant) -> Actor:
    actor = require_role(actor, tenant, Role.OWNER)
    if actor.key is not None and not actor.is_operator:
        raise PermissionDenied("Only an owner who is logged in may do this, not a key.")
    return actor


#: Maximum reserved share of each replica's KV cache, over all active tenants: the rest is shared.
MAX_RESERVED_FRACTION = 0.9


def validate_kv_quota(tenant: Tenant) -> None:
    """Refuse a reserve above the tenant's own maximum, or too large together with the others'.

    Call it in the transaction that saved the tenant: the rows of all tenants with a reserve are
    locked, so that concurrent changes are counted one after the other.

    Raises: `InvalidRequest` with `param` and, if other tenants have reserves, the sum.
    """
    reserved = tenant.kv_reserved_fraction
    if reserved > tenant.kv_max_fraction:
        raise InvalidRequest(
            f"kv_reserved_fraction is {reserved:g}, above the tenant's own kv_max_fraction of "
            f"{tenant.kv_max_fraction:g}.",
            param="kv_reserved_fraction",
        )
    if not reserved or not tenant.active:
        return
    reserving = Tenant.objects.select_for_update().filter(active=True, kv_reserved_fraction__gt=0)
    shares = reserving.order_by("pk").values_list("kv_reserved_fraction", flat=True)
    total = math.fsum(shares)
    if total > MAX_RESERVED_FRACTION + 1e-9:
        raise InvalidRequest(
            f"Reserved KV cache of all tenants would be {total:g}; the maximum is "
            f"{MAX_RESERVED_FRACTION:g}.",
            param="kv_reserved_fraction",
        )


#: Fields for operators; a tenant's admins may change its name, its owners `OWNER_FIELDS`.
LIMITS = (
    "weight",
    "kv_reserved_fraction",
    "kv_max_fraction",
    "max_priority",
    "requests_per_minute",
    "tokens_per_minute",
    "media_per_minute",
    "media_bytes_per_minute",
    "media_seconds_per_minute",
    "max_running_requests",
    "max_context_tokens",
    "allowed_models",
    "time_zone",
    "keep_usage_days",
)
#: Fields for owners.
OWNER_FIELDS = ("keep_content_days", "keep_conversations", "store_prompts")


@transaction.atomic
def create_tenant(
    *,
    actor: Actor | User,
    name: str,
    slug: str = "",
    owner: User | None = None,
    **limits: Any,
) -> Tenant:
    """Create a tenant; `slug` defaults to one derived from the name.

    Raises: `PermissionDenied`, `InvalidRequest` (with `param`), `Conflict` when the slug is taken.
    """
    actor = require_operator(actor)
    if unknown := set(limits).difference(LIMITS, OWNER_FIELDS):
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
    validate_kv_quota(tenant)
    if owner is not None:
        Membership.objects.create(tenant=tenant, user=owner, role=Role.OWNER)
    log_action(
        actor,
        "tenant.create",
        tenant,
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
    actor = to_actor(actor)
    if unknown := set(changes).difference(LIMITS, OWNER_FIELDS, {"name"}):
        raise InvalidRequest(f"{sorted(unknown)[0]} can't be changed.", param=sorted(unknown)[0])
    require_role(actor, tenant, Role.OWNER if set(changes) & set(OWNER_FIELDS) else Role.ADMIN)
    if set(changes).intersection(LIMITS):
        require_operator(actor)
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    difference = changed(tenant, changes)
    if difference:
        save_valid(tenant)
        if {"kv_reserved_fraction", "kv_max_fraction"} & set(difference):
            validate_kv_quota(tenant)
        log_action(actor, "tenant.update", tenant, tenant=tenant, changes=difference)
        _send_signal_on_commit(tenant)
    return tenant


@transaction.atomic
def set_tenant_active(*, actor: Actor | User, tenant: Tenant, active: bool) -> Tenant:
    """Activate a tenant, or deactivate it: its keys and members are refused within seconds.

    Raises: `PermissionDenied`; `Conflict` for an erased one.
    """
    actor = require_operator(actor)
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    if active and tenant.erase_requested_at is not None:
        raise Conflict("This tenant is erased.")
    if tenant.active != active:
        tenant.active = active
        tenant.save(update_fields=["active"])
        if active:
            validate_kv_quota(tenant)
        verb = "tenant.activate" if active else "tenant.deactivate"
        log_action(actor, verb, tenant, tenant=tenant)
        _send_signal_on_commit(tenant)
    return tenant


@transaction.atomic
def rotate_cache_salt(*, actor: Actor | User, tenant: Tenant) -> Tenant:
    """Give the tenant a new cache namespace, so that nothing cached before is ever hit again."""
    actor = require_role(actor, tenant, Role.OWNER)
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    tenant.salt = new_salt()
    tenant.save(update_fields=["salt"])
    log_action(actor, "tenant.rotate_cache_salt", tenant, tenant=tenant)
    _send_signal_on_commit(tenant)
    return tenant


def _send_signal_on_commit(tenant: Tenant) -> None:
    """Notify this process once the change is committed."""
    transaction.on_commit(partial(tenant_changed.send, sender=Tenant, tenant=tenant))
