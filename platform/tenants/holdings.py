"""What is kept of a tenant, by kind: for its export, its erasure, and what is kept too long.

An app that keeps something of tenants says so when it starts (`register`); a test looks whether
each model with a tenant is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.db.models import Model, QuerySet

from tenants.models import Tenant

#: Rows that are removed in one transaction: nobody waits for long behind it.
PART = 2000


@dataclass(frozen=True)
class Holding:
    """One kind of what is kept.

    Attributes:
        name: of its file in an export.
        rows: all of a tenant's.
        model: of the rows. None: nothing that an export would show.
        secret: fields that an export leaves out.
        erase: removes a tenant's and returns how many; calling it again is harmless. None: they
            stay, as the audit log does.
        files: names and places of files that belong to it.
    """

    name: str
    rows: Callable[[Tenant], QuerySet[Any]] | None = None
    model: type[Model] | None = None
    secret: tuple[str, ...] = ()
    erase: Callable[[Tenant], int] | None = None
    files: Callable[[Tenant], Iterator[tuple[str, Path]]] | None = None


_holdings: dict[str, Holding] = {}


def register(holding: Holding) -> None:
    """Add a kind; one of the same name gives way."""
    _holdings[holding.name] = holding


def holdings() -> list[Holding]:
    """All kinds, in the order in which they were added: what refers to others comes first."""
    return list(_holdings.values())


def of_tenant(
    name: str, model: type[Model], *, secret: tuple[str, ...] = (), stays: bool = False
) -> Holding:
    """The plain kind: rows whose `tenant` it is."""

    def rows(tenant: Tenant) -> QuerySet[Any]:
        return model._default_manager.filter(tenant=tenant)

    def erase(tenant: Tenant) -> int:
        return remove_in_parts(rows(tenant))

    return Holding(name, rows, model, secret, None if stays else erase)


def remove_in_parts(rows: QuerySet[Any]) -> int:
    """Delete rows, `PART` at a time; how many."""
    removed = 0
    while keys := list(rows.order_by("pk").values_list("pk", flat=True)[:PART]):
        rows.model._default_manager.filter(pk__in=keys).delete()
        removed += len(keys)
    return removed
