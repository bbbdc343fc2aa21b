"""Helpers of the adapter commands."""

from __future__ import annotations

from django.core.management.base import CommandError, CommandParser
from django.db.models import QuerySet

from adapters.models import Adapter
from tenants.cli import find_tenant
from tenants.models import Tenant


def add_adapter_arguments(parser: CommandParser) -> None:
    parser.add_argument("name", help="NAME, or MODEL:NAME")
    parser.add_argument(
        "--tenant", metavar="NAME", help="owning tenant (default: shared with all tenants)"
    )


def find_adapter(name: str, tenant: str | None) -> Adapter:
    """The adapter, or a `CommandError` that lists the existing ones."""
    rows = Adapter.objects.select_related("tenant", "served_model")
    model, colon, adapter_name = name.rpartition(":")
    named = (
        rows.filter(name=adapter_name, served_model__name=model)
        if colon
        else rows.filter(name=name)
    )
    whose = find_tenant(tenant) if tenant else None
    matches = list(named.filter(tenant=whose))
    if not matches:
        raise CommandError(_missing(name, whose, rows.filter(tenant=whose), named))
    if len(matches) > 1:
        names = " or ".join(str(row) for row in matches)
        raise CommandError(f"Several models have an adapter {name!r}: name {names}.")
    return matches[0]


def _missing(
    name: str, tenant: Tenant | None, rows: QuerySet[Adapter], named: QuerySet[Adapter]
) -> str:
    """The error for a missing adapter, with the existing ones."""
    location = f"of {tenant.slug}" if tenant else "shared by all tenants"
    existing = ", ".join(str(row) for row in rows[:20]) or "none yet"
    message = f"There is no adapter {name!r} {location}. Adapters {location}: {existing}."
    owners = sorted({row.owner for row in named[:20]})
    hints = [f"--tenant {owner}" if owner else "no --tenant" for owner in owners]
    return f"{message} One of that name is found with {' or '.join(hints)}." if hints else message
