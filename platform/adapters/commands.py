"""What the adapter commands have in common."""

from __future__ import annotations

from django.core.management.base import CommandError, CommandParser

from adapters.models import Adapter
from tenants.commands import find_tenant


def add_adapter_arguments(parser: CommandParser) -> None:
    """Which adapter."""
    parser.add_argument("name", help="NAME, or MODEL:NAME")
    parser.add_argument(
        "--tenant", metavar="NAME", help="whose it is (default: shared by all tenants)"
    )


def find_adapter(name: str, tenant: str | None) -> Adapter:
    """The adapter, or a `CommandError` that names those there are."""
    rows = Adapter.objects.select_related("tenant", "served_model")
    rows = rows.filter(tenant=find_tenant(tenant) if tenant else None)
    model, colon, own = name.rpartition(":")
    found = list(
        rows.filter(name=own, served_model__name=model) if colon else rows.filter(name=name)
    )
    if not found:
        known = ", ".join(str(row) for row in rows[:20]) or "none yet"
        raise CommandError(f"There is no adapter {name!r} here. Adapters: {known}.")
    if len(found) > 1:
        names = " or ".join(str(row) for row in found)
        raise CommandError(f"Several models have an adapter {name!r}: name {names}.")
    return found[0]
