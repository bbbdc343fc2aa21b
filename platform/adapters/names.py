"""What budgets and prices may be for: names of models and of adapters, today.

Either may be set before there is such a model, so a name that nothing has is told, not refused.
"""

from __future__ import annotations

from collections.abc import Collection

from django.db.models import Q

from adapters.models import AdapterAlias
from catalog.access import access_served_models
from catalog.models import ServedModel
from metering.rules import names_of
from tenants.models import Tenant


def names_for(tenant: Tenant) -> frozenset[str]:
    """Names that a budget of the tenant's may have: its models', loaded or not, and adapters'."""
    models = access_served_models(tenant).values_list("name", flat=True)
    rows = AdapterAlias.objects.filter(Q(tenant=tenant) | Q(tenant=None))
    adapters = rows.values_list("served_model__name", "name")
    return frozenset(models) | {each for row in adapters for each in names_of(*row)}


def priced_names() -> frozenset[str]:
    """Names that a price may have, over all tenants: of a tenant's own adapter with its slug."""
    found = set(ServedModel.objects.values_list("name", flat=True))
    rows = AdapterAlias.objects.values_list("served_model__name", "name", "tenant__slug")
    for base, name, owner in rows:
        found |= {f"{base}:{name}#{owner}"} if owner else {name, f"{base}:{name}"}
    return frozenset(found)


def warning(name: str, known: Collection[str]) -> str:
    """A sentence about a name that nothing has, or ""."""
    if not name or name in known:
        return ""
    return f"No model or adapter is called {name} today: it holds as soon as one is."
