"""The only functions that read adapters. Without access they raise `NotFound` (404)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, F, Q, QuerySet, Sum
from django.utils import timezone

from adapters.actions.base import require
from adapters.models import Adapter, AdapterAlias, AdapterUpload, AdapterVersion
from catalog.access import access_served_models
from catalog.models import ServedModel
from common.errors import NotFound
from metering.access import access_usage_entries
from metering.budgets import access_prices
from metering.models import Price, UsageEntry
from metering.request_log import access_requests, called
from metering.rules import billing_names
from tenants.access import AccessSubject, access_role, access_tenants
from tenants.actors import require_operator, to_actor
from tenants.models import Role, Tenant

# Budgets and prices may name a model that doesn't exist yet, so an unknown name is a warning, not
# an error.


def names_for(tenant: Tenant) -> frozenset[str]:
    """Names that a tenant's budget may have: its models', loaded or not, and its adapters'."""
    models = access_served_models(tenant).values_list("name", flat=True)
    rows = AdapterAlias.objects.filter(Q(tenant=tenant) | Q(tenant=None))
    adapters = rows.values_list("served_model__name", "name")
    return frozenset(models) | {name for row in adapters for name in billing_names(*row)}


def priceable_names() -> frozenset[str]:
    """Names that a price may have, over all tenants: a tenant's own adapter with its slug."""
    names = set(ServedModel.objects.values_list("name", flat=True))
    rows = AdapterAlias.objects.values_list("served_model__name", "name", "tenant__slug")
    for base, name, owner in rows:
        names |= {f"{base}:{name}#{owner}"} if owner else {name, f"{base}:{name}"}
    return frozenset(names)


def access_prices_of(reader: AccessSubject) -> QuerySet[Price]:
    """Prices, with their history, of what the reader's tenants may use; all for an operator.

    The name in a price can reveal another tenant, its models and its adapters.
    """
    if to_actor(reader).is_operator:
        return access_prices()
    names: set[str] = set()
    for tenant in access_tenants(reader):
        aliases = AdapterAlias.objects.filter(tenant=tenant)
        rows = aliases.values_list("served_model__name", "name")
        names |= names_for(tenant) | {f"{base}:{name}#{tenant.slug}" for base, name in rows}
    return access_prices().filter(model__in=names)


def unknown_name_warning(name: str, names: Collection[str]) -> str:
    """A warning about an unknown name, or ""."""
    if not name or name in names:
        return ""
    return f"No model or adapter is called {name} today: it applies as soon as one is."


def access_adapters(user: AccessSubject, tenant: Tenant | None) -> QuerySet[Adapter]:
    """A tenant's own adapters and those shared with it, for any member.

    Without a tenant all shared adapters, for operators.
    """
    if tenant is None:
        require_operator(user)
        shared = Adapter.objects.select_related("tenant", "served_model")
        return shared.filter(tenant__isnull=True)
    access_role(user, tenant)
    return adapters_of(tenant)


def adapters_of(tenant: Tenant) -> QuerySet[Adapter]:
    """A tenant's own adapters and those shared with it, for users who may see them."""
    rows = Adapter.objects.select_related("tenant", "served_model")
    models = access_served_models(tenant).values("pk")
    return rows.filter(Q(tenant=tenant) | Q(tenant__isnull=True, served_model__in=models))


def access_adapter(user: AccessSubject, tenant: Tenant | None, pk: int) -> Adapter:
    """Raises `NotFound`."""
    adapter = access_adapters(user, tenant).filter(pk=pk).first()
    if adapter is None:
        raise NotFound("Adapter not found.")
    return adapter


def access_version(user: AccessSubject, adapter: Adapter, number: int) -> AdapterVersion:
    """A version of an adapter that the user may see. Raises `NotFound`."""
    version = adapter.versions.filter(number=number).first()
    if version is None:
        raise NotFound(f"{adapter} has no version {number}.")
    version.adapter = adapter
    return version


def access_alias(user: AccessSubject, adapter: Adapter, name: str) -> AdapterAlias:
    """A name of an adapter that the user may see; "" is the adapter's own. Raises `NotFound`."""
    rows = adapter.aliases.select_related("version", "canary", "previous")
    alias = rows.filter(name=name or adapter.name).first()
    if alias is None:
        raise NotFound(f"{adapter} has no alias {name[:100]!r}.", param="alias")
    alias.adapter = adapter
    return alias


def access_uploads(user: AccessSubject, tenant: Tenant | None) -> QuerySet[AdapterUpload]:
    """Uploads in progress, for members; without a tenant shared adapters', for operators."""
    require(to_actor(user), tenant, Role.MEMBER)
    return AdapterUpload.objects.filter(tenant=tenant).select_related("tenant", "served_model")


def access_upload(user: AccessSubject, tenant: Tenant | None, public_id: str) -> AdapterUpload:
    """Raises `NotFound`."""
    upload = access_uploads(user, tenant).filter(public_id=public_id).first()
    if upload is None:
        raise NotFound("Upload not found.")
    return upload


DAYS = 14


def usage_of(user: AccessSubject, tenant: Tenant, adapters: Iterable[Adapter]) -> dict[int, Any]:
    """Each adapter's use by the tenant in the last `DAYS` days.

    Returns: {pk: {"requests", "tokens", "by_digest": {digest: requests}}}.

    Raises `NotFound` for users who aren't members.
    """
    since = timezone.now() - timedelta(days=DAYS)
    by_pk = {adapter.pk: adapter for adapter in adapters}
    result: dict[int, Any] = {pk: {"requests": 0, "tokens": 0, "by_digest": {}} for pk in by_pk}
    if not by_pk:
        return result
    names, holders = _names(tenant), _holders(tenant)
    for row in _sums(access_usage_entries(user, tenant), since):
        having = holders.get((row["model"], row["adapter_digest"]), [])
        named = names.get((row["model"], row["adapter"]))
        pk = named if named in having else next(iter(having), None)
        if pk not in result:
            continue
        result[pk]["requests"] += row["requests"]
        result[pk]["tokens"] += row["prompt"] + row["completion"]
        by_digest = result[pk]["by_digest"]
        digest = row["adapter_digest"]
        by_digest[digest] = by_digest.get(digest, 0) + row["requests"]
    return result


def _names(tenant: Tenant) -> dict[tuple[str, str], int]:
    """{(model, name): owner}: the tenant's own before shared ones."""
    rows = AdapterAlias.objects.filter(Q(tenant=tenant) | Q(tenant=None))
    ordered = rows.order_by(F("tenant").asc(nulls_first=True))
    return {
        (model, name): pk
        for model, name, pk in ordered.values_list("served_model__name", "name", "adapter")
    }


def _holders(tenant: Tenant) -> dict[tuple[str, str], list[int]]:
    """{(model, digest): the adapters that have this content}, the tenant's own first.

    If several have the same content, the requested name decides.
    """
    rows = AdapterVersion.objects.filter(Q(adapter__tenant=tenant) | Q(adapter__tenant=None))
    ordered = rows.exclude(digest="").order_by(F("adapter__tenant").asc(nulls_last=True), "pk")
    holders: dict[tuple[str, str], list[int]] = {}
    columns = ("adapter__served_model__name", "digest", "adapter")
    for model, digest, pk in ordered.values_list(*columns):
        holders.setdefault((model, digest), []).append(pk)
    return holders


def access_request(user: AccessSubject, tenant: Tenant, request_id: str) -> UsageEntry:
    """Ledger entry of a tenant's request, by any id that a client has: the answer's
    (`chatcmpl-...`, `resp_...`) or the header's (`x-request-id`). Raises `NotFound`.

    The ledger stores only one of them; by the others the newest request still logged is returned.
    """
    rows = access_usage_entries(user, tenant)
    entry = rows.filter(request_id=request_id.strip()[:200]).first()
    if entry is None:
        logged = access_requests(user, tenant).filter(called(request_id)).first()
        entry = rows.filter(request_id=logged.request_id).first() if logged is not None else None
    if entry is None:
        raise NotFound(f"The ledger has no request {request_id[:200]!r}.")
    return entry


def _sums(rows: QuerySet[UsageEntry], since: datetime) -> Iterable[Mapping[str, Any]]:
    used = rows.filter(~Q(adapter=""), started_at__gte=since).order_by()
    return used.values("model", "adapter", "adapter_digest").annotate(
        requests=Count("pk"), prompt=Sum("prompt_tokens"), completion=Sum("completion_tokens")
    )
