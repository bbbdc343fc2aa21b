"""What adapters were used for, from the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, F, Q, QuerySet, Sum
from django.utils import timezone

from adapters.access import Reader
from adapters.errors import NotFound
from adapters.models import Adapter, AdapterAlias, AdapterVersion
from metering.access import access_usage_entries
from metering.models import UsageEntry
from metering.requests.access import access_requests, called
from tenants.models import Tenant

DAYS = 14


def usage_of(user: Reader, tenant: Tenant, adapters: Iterable[Adapter]) -> dict[int, Any]:
    """Each adapter's use by the tenant in the last `DAYS` days: {pk: {"requests", "tokens",
    "by_digest": {digest: requests}}}.

    Raises `NotFound` for a stranger.
    """
    since = timezone.now() - timedelta(days=DAYS)
    found = {adapter.pk: adapter for adapter in adapters}
    result: dict[int, Any] = {pk: {"requests": 0, "tokens": 0, "by_digest": {}} for pk in found}
    if not found:
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
    """{(model, name): whose it is}: the tenant's own before shared ones."""
    rows = AdapterAlias.objects.filter(Q(tenant=tenant) | Q(tenant=None))
    ordered = rows.order_by(F("tenant").asc(nulls_first=True))
    return {
        (model, name): pk
        for model, name, pk in ordered.values_list("served_model__name", "name", "adapter")
    }


def _holders(tenant: Tenant) -> dict[tuple[str, str], list[int]]:
    """{(model, digest): the adapters that have this content}, the tenant's own first.

    Several may: then the name that was asked for tells which one it was.
    """
    rows = AdapterVersion.objects.filter(Q(adapter__tenant=tenant) | Q(adapter__tenant=None))
    ordered = rows.exclude(digest="").order_by(F("adapter__tenant").asc(nulls_last=True), "pk")
    found: dict[tuple[str, str], list[int]] = {}
    columns = ("adapter__served_model__name", "digest", "adapter")
    for model, digest, pk in ordered.values_list(*columns):
        found.setdefault((model, digest), []).append(pk)
    return found


def access_request(user: Reader, tenant: Tenant, request_id: str) -> UsageEntry:
    """What the ledger has of one request of the tenant's, by whatever id a client has of it: the
    answer's (`chatcmpl-...`, `resp_...`) or the header's (`x-request-id`). Raises `NotFound`.

    The ledger itself has one of them; of the others the newest request counts that is still kept.
    """
    rows = access_usage_entries(user, tenant)
    found = rows.filter(request_id=request_id.strip()[:200]).first()
    if found is None:
        kept = access_requests(user, tenant).filter(called(request_id)).first()
        found = rows.filter(request_id=kept.request_id).first() if kept is not None else None
    if found is None:
        raise NotFound(f"The ledger has no request {request_id[:200]!r}.")
    return found


def _sums(rows: QuerySet[UsageEntry], since: datetime) -> QuerySet[Any, dict[str, Any]]:
    used = rows.filter(~Q(adapter=""), started_at__gte=since).order_by()
    return used.values("model", "adapter", "adapter_digest").annotate(
        requests=Count("pk"), prompt=Sum("prompt_tokens"), completion=Sum("completion_tokens")
    )
