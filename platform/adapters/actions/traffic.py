"""Which version is served under which name."""

from __future__ import annotations

from django.db import transaction
from django.db.models import Q

from adapters import pins
from adapters.actions.adapters import check_free
from adapters.actions.base import announce, locked_adapter, locked_alias, locked_version, require
from adapters.models import PASSED, Adapter, AdapterAlias, AdapterVersion, VersionState
from common.db import save_valid
from common.errors import Conflict
from engine.contract.errors import InvalidRequest
from tenants.actors import Actor, require_operator, to_actor
from tenants.audit import log_action
from tenants.models import Role, User


@transaction.atomic
def pin(*, actor: Actor | User, adapter: Adapter) -> Adapter:
    """Keep the versions under the adapter's names in memory on every replica of its model.

    Tenants share this memory, so it is for operators. Raises: `PermissionDenied`, `NotFound`;
    `Conflict` if pins would exceed half of a replica's memory for adapters; `ServiceUnavailable`.
    """
    return _set(actor, adapter, pinned=True)


@transaction.atomic
def unpin(*, actor: Actor | User, adapter: Adapter) -> Adapter:
    """Allow its memory to be reused when it is idle. Raises the errors of `pin`."""
    return _set(actor, adapter, pinned=False)


def _set(actor: Actor | User, adapter: Adapter, *, pinned: bool) -> Adapter:
    actor = require_operator(actor)
    row = locked_adapter(adapter)
    if row.pinned == pinned:
        return row
    if pinned:
        pins.check_capacity(row)
    row.pinned = pinned
    row.save(update_fields=["pinned", "changed_at"])
    log_action(
        actor,
        "adapter.pin" if pinned else "adapter.unpin",
        row,
        tenant=row.tenant,
        changes={"pinned": [not pinned, pinned]},
    )
    announce(row)
    return row


@transaction.atomic
def promote(
    *, actor: Actor | User, version: AdapterVersion, alias: str = "", percent: int = 100
) -> AdapterAlias:
    """Serve a version under a name of its adapter: for all requests, or for a share as a canary.

    Running requests continue with their version.

    Args:
        alias: "" for the adapter's own name; a missing one is created.
        percent: 1 to 100.
    Raises: `NotFound`, `PermissionDenied`; `InvalidRequest` with `param`; `Conflict` for a version
    that hasn't passed its check, and for a name that is taken.
    """
    actor = to_actor(actor)
    version = locked_version(version)
    adapter = version.adapter
    require(actor, adapter.tenant, Role.ADMIN)
    if isinstance(percent, bool) or not isinstance(percent, int) or not 1 <= percent <= 100:
        raise InvalidRequest("percent must be a whole number from 1 to 100.", param="percent")
    if version.state not in PASSED:
        raise Conflict(
            f"{version} is {version.get_state_display().lower()}: only a version whose check has "
            "passed can go live."
        )
    row = _alias(adapter, alias or adapter.name)
    previous_traffic = _traffic(row)
    if percent == 100:
        if row.version_id != version.pk:
            row.previous, row.version = row.version or row.previous, version
        row.canary, row.canary_percent = None, 0
    elif row.version_id in (None, version.pk):
        raise InvalidRequest(
            "A canary needs another live version. Promote this version for 100 percent first.",
            param="percent",
        )
    else:
        row.canary, row.canary_percent = version, percent
    return _saved(actor, row, "adapter.promote", previous_traffic)


@transaction.atomic
def rollback(*, actor: Actor | User, alias: AdapterAlias) -> AdapterAlias:
    """End a canary; without one, return to the previous version.

    Raises: `NotFound`, `PermissionDenied`; `Conflict` without a canary or previous version.
    """
    actor = to_actor(actor)
    row = locked_alias(alias)
    require(actor, row.adapter.tenant, Role.ADMIN)
    previous_traffic = _traffic(row)
    if row.canary is not None:
        row.canary, row.canary_percent = None, 0
    elif row.previous is not None:
        row.version, row.previous = row.previous, row.version
    else:
        raise Conflict(f"{row} has no earlier version to turn back to.")
    return _saved(actor, row, "adapter.rollback", previous_traffic)


@transaction.atomic
def take_offline(*, actor: Actor | User, adapter: Adapter) -> Adapter:
    """Take the adapter's names offline; a rollback restores them.

    Raises: `NotFound`, `PermissionDenied`; `Conflict` if none is live.
    """
    actor = to_actor(actor)
    adapter = locked_adapter(adapter)
    require(actor, adapter.tenant, Role.ADMIN)
    served = list(adapter.aliases.filter(version__isnull=False).select_related("version", "canary"))
    if not served:
        raise Conflict(f"{adapter} is not live.")
    for alias in served:
        alias.adapter = adapter
        previous_traffic = _traffic(alias)
        alias.previous, alias.version = alias.version, None
        alias.canary, alias.canary_percent = None, 0
        _saved(actor, alias, "adapter.offline", previous_traffic)
    return adapter


@transaction.atomic
def delete_alias(*, actor: Actor | User, alias: AdapterAlias) -> None:
    """Delete an alias. The adapter's own name stays: raises `Conflict` for it."""
    actor = to_actor(actor)
    row = locked_alias(alias)
    adapter = row.adapter
    require(actor, adapter.tenant, Role.ADMIN)
    if row.name == adapter.name:
        raise Conflict(f"{row} is the adapter's own name: it goes with the adapter.")
    log_action(actor, "adapter.delete_alias", row, tenant=adapter.tenant)
    row.delete()
    _mark(adapter)
    announce(adapter)


def _alias(adapter: Adapter, name: str) -> AdapterAlias:
    """The adapter's alias, created if the name is free. Raises `Conflict`, `InvalidRequest`."""
    rows = AdapterAlias.objects.select_related("version", "canary", "previous")
    existing = rows.filter(
        tenant=adapter.tenant, served_model=adapter.served_model, name=name
    ).first()
    if existing is not None:
        if existing.adapter_id != adapter.pk:
            raise Conflict(f"{name} is a name of another adapter.", param="alias")
        existing.adapter = adapter
        return existing
    check_free(adapter.tenant, name, "alias")
    created = AdapterAlias(
        adapter=adapter, tenant=adapter.tenant, served_model=adapter.served_model, name=name
    )
    try:
        save_valid(created)
    except InvalidRequest as error:
        if error.param == "name":
            error.rename("alias")
        raise
    return created


def _traffic(alias: AdapterAlias) -> dict[str, int | None]:
    """Numbers of versions, for the audit log."""
    return {
        "version": alias.version.number if alias.version else None,
        "canary": alias.canary.number if alias.canary else None,
        "canary_percent": alias.canary_percent,
    }


def _saved(
    actor: Actor, alias: AdapterAlias, action: str, previous_traffic: dict[str, int | None]
) -> AdapterAlias:
    alias.save()
    _mark(alias.adapter)
    after = _traffic(alias)
    changes = {
        name: [previous_traffic[name], after[name]]
        for name in after
        if previous_traffic[name] != after[name]
    }
    digest = alias.version.digest if alias.version else ""
    log_action(actor, action, alias, tenant=alias.adapter.tenant, changes=changes, sha256=digest)
    announce(alias.adapter)
    return alias


def _mark(adapter: Adapter) -> None:
    """Mark versions that an alias serves as live, and the others that passed as ready."""
    leads = Q(live_as__isnull=False) | Q(canary_as__isnull=False)
    passed = adapter.versions.filter(state__in=PASSED)
    live = set(passed.filter(leads).values_list("pk", flat=True))
    passed.filter(pk__in=live).update(state=VersionState.LIVE)
    passed.exclude(pk__in=live).update(state=VersionState.READY)
