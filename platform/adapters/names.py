"""What budgets and prices may be for: names of models and of adapters, today.

Either may be set before there is such a model, so a name that nothing has is told, not refused.
"""

from __future__ import annotations

from collections.abc import Collection

from django.db.models import Q, QuerySet

from adapters.models import AdapterAlias
from catalog.access import access_served_models
from catalog.models import ServedModel
from metering.models import Price
from metering.rules import names_of
from metering.spending import access_prices
from tenants.access import Reader, access_tenants
from tenants.actors import as_actor
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


def access_prices_of(reader: Reader) -> QuerySet[Price]:
    """Prices of what the reader's tenants may use, with their history; all for an operator.

    A price's name can tell of another tenant, of its models and of its adapters.
    """
    if as_actor(reader).is_operator:
        return access_prices()
    names: set[str] = set()
    for tenant in access_tenants(reader):
        own = AdapterAlias.objects.filter(tenant=tenant)
        rows = own.values_list("served_model__name", "name")
        names |= names_for(tenant) | {f"{base}:{name}#{tenant.slug}" for base, name in rows}
    return access_prices().filter(model__in=names)


def warning(name: str, known: Collection[str]) -> str:
    """A sentence about a name that nothing has, or ""."""
    if not name or name in known:
        return ""
    return f"No model or adapter is called {name} today: it applies as soon as one is."
