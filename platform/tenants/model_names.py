"""Which models there are, for those who name some: the catalogue and the adapters say it.

They stand above, so that each says so when it starts (`register`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenants.models import Tenant

#: What gives the names that a tenant may ask for, of one kind.
Names = Callable[["Tenant"], Iterable[str]]
_sources: list[Names] = []


def register(source: Names) -> None:
    """Names of another kind."""
    _sources.append(source)


def unknown_models(tenant: Tenant, wanted: Iterable[str]) -> list[str]:
    """Those that the tenant can ask for under no name as of now, in their order."""
    known = {name for source in _sources for name in source(tenant)}
    return [name for name in wanted if name not in known]
