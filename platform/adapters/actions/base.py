"""Helpers of the actions: permissions, locked rows, signals on commit."""

from __future__ import annotations

from functools import partial

from django.db import transaction

from adapters.models import Adapter, AdapterAlias, AdapterVersion
from adapters.signals import adapters_changed
from common.errors import NotFound
from tenants.actors import Actor, require_operator, require_role
from tenants.models import Role, Tenant


def require(actor: Actor, tenant: Tenant | None, role: Role) -> None:
    """Raise unless the actor has the role in the tenant; shared adapters are for operators."""
    if tenant is None:
        require_operator(actor)
    else:
        require_role(actor, tenant, role)


def locked_adapter(adapter: Adapter) -> Adapter:
    """The current row, locked until the transaction ends. Raises `NotFound`."""
    rows = Adapter.objects.select_for_update(of=("self",)).select_related("tenant", "served_model")
    row = rows.filter(pk=adapter.pk).first()
    if row is None:
        raise NotFound("Adapter not found.")
    return row


def locked_version(version: AdapterVersion) -> AdapterVersion:
    """The version, locked after its adapter."""
    adapter = locked_adapter(version.adapter)
    row = AdapterVersion.objects.filter(pk=version.pk).first()
    if row is None:
        raise NotFound("Version not found.")
    row.adapter = adapter
    return row


def locked_alias(alias: AdapterAlias) -> AdapterAlias:
    """The alias, locked."""
    adapter = locked_adapter(alias.adapter)
    rows = AdapterAlias.objects.select_related("version", "canary", "previous")
    row = rows.filter(pk=alias.pk).first()
    if row is None:
        raise NotFound("Alias not found.")
    row.adapter = adapter
    return row


def announce(adapter: Adapter) -> None:
    """Notify this process once the change is committed."""
    transaction.on_commit(partial(adapters_changed.send, Adapter, adapter=adapter))
