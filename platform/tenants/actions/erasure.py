"""A tenant's data taken along, and erased."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from django.db import transaction
from django.utils import timezone

from engine.contract.errors import InvalidRequest
from tenants.actions.offboarding import end_access
from tenants.actors import SYSTEM, Actor, as_actor, require_role
from tenants.audit import record
from tenants.errors import PermissionDenied
from tenants.events import tenant_changed
from tenants.holdings import holdings
from tenants.models import Membership, Role, Tenant, User
from tenants.models.tenant import new_salt
from tenants.work import hint

ERASE = "tenants.erase"
#: Usage of requests that ran when a tenant was erased still comes in, and goes too, for so long.
AFTERMATH = timedelta(days=1)


@transaction.atomic
def begin_export(*, actor: Actor | User, tenant: Tenant) -> None:
    """Note that somebody takes all of a tenant's data along; `tenants.export` makes the archive.

    Raises: `NotFound`, `PermissionDenied` for all but owners in person and operators.
    """
    actor = _owner(actor, tenant)
    record(actor=actor, action="tenant.export", target=tenant, tenant=tenant)


@transaction.atomic
def erase_tenant(*, actor: Actor | User, tenant: Tenant, confirm: str) -> Tenant:
    """Switch a tenant off at once, and have workers remove all that is kept of it. For good.

    The audit log stays, and a nameless row that it refers to. People stay: they are no tenant's.

    Args:
        confirm: the tenant's short name, so that nobody does it by mistake.
    Raises: what `begin_export` raises; `InvalidRequest` with `param`.
    """
    actor = _owner(actor, tenant)
    if confirm != tenant.slug:
        raise InvalidRequest(f"Type the tenant's short name, {tenant.slug}.", param="confirm")
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    if tenant.erase_requested_at is None:
        record(actor=actor, action="tenant.erase", target=tenant, tenant=tenant)
        for member in Membership.objects.filter(tenant=tenant).select_related("user"):
            end_access(actor=actor, user=member.user, tenant=tenant)
        tenant.active, tenant.erase_requested_at = False, timezone.now()
        tenant.save(update_fields=["active", "erase_requested_at"])
        transaction.on_commit(partial(tenant_changed.send, sender=Tenant, tenant=tenant))
        transaction.on_commit(partial(hint, ERASE, tenant.pk))
    return tenant


def remove_data(*, tenant: Tenant) -> dict[str, int]:
    """Remove all that is kept of a tenant that shall be erased; how many of each kind. May block.

    A worker that dies in the middle leaves the rest to the next.
    """
    removed = {
        each.name: count for each in holdings() if each.erase and (count := each.erase(tenant))
    }
    with transaction.atomic():
        found = Tenant.objects.select_for_update().get(pk=tenant.pk)
        if found.erased_at is None:
            found.slug, found.name = f"erased-{found.pk}", "Erased"
            found.salt, found.erased_at = new_salt(), timezone.now()
            found.keep_content_days = found.keep_usage_days = None
            found.store_prompts = False
            found.allowed_models = []
            found.save()
        if removed:
            record(actor=SYSTEM, action="tenant.remove_data", target=found, tenant=found, **removed)
    return removed


def remove_requested() -> int:
    """Remove what is left of tenants that shall be erased; how many rows."""
    late = timezone.now() - AFTERMATH
    waiting = Tenant.objects.exclude(erase_requested_at=None).exclude(erased_at__lt=late)
    return sum(sum(remove_data(tenant=tenant).values()) for tenant in waiting)


def _owner(actor: Actor | User, tenant: Tenant) -> Actor:
    actor = as_actor(actor)
    require_role(actor, tenant, Role.OWNER)
    if actor.key is not None and not actor.is_operator:
        raise PermissionDenied("Only an owner who is logged in may do this, not a key.")
    return actor
