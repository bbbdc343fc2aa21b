"""Reading the ledger: sums by day, model and tenant."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta

from django.db.models import Count, QuerySet, Sum
from django.db.models.functions import TruncDate

from metering.models import UsageEntry
from tenants.access import access_role
from tenants.actors import as_actor, require_operator
from tenants.models import Tenant, User

DEFAULT_DAYS = 30


@dataclass(frozen=True)
class UsageSum:
    """Usage of one model (of one tenant) on one day, by UTC."""

    day: date
    model: str
    tenant: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.completion_tokens


def access_usage(
    user: User, tenant: Tenant, *, first: date | None = None, last: date | None = None
) -> list[UsageSum]:
    """Sums by day and model of one tenant, newest day first, for any of its members.

    Days are UTC's, so none is longer than another. `first` and `last` are included; by default the
    last 30 days. Raises `NotFound` for a stranger.
    """
    access_role(user, tenant)
    return _sums(UsageEntry.objects.filter(tenant=tenant), first, last)


def access_all_usage(
    user: User, *, first: date | None = None, last: date | None = None
) -> list[UsageSum]:
    """Sums by day, model and tenant. Raises `PermissionDenied` for all but operators."""
    require_operator(as_actor(user))
    return _sums(UsageEntry.objects.all(), first, last)


def access_usage_entries(user: User, tenant: Tenant) -> QuerySet[UsageEntry]:
    """A tenant's single entries, newest first. Raises `NotFound` for a stranger."""
    access_role(user, tenant)
    return UsageEntry.objects.filter(tenant=tenant).select_related("api_key")


def _sums(entries: QuerySet[UsageEntry], first: date | None, last: date | None) -> list[UsageSum]:
    last = last or datetime.now(UTC).date()
    first = first or last - timedelta(days=DEFAULT_DAYS - 1)
    start = datetime.combine(first, time.min, UTC)
    end = datetime.combine(last + timedelta(days=1), time.min, UTC)
    rows = (
        entries.filter(started_at__gte=start, started_at__lt=end)
        .annotate(day=TruncDate("started_at", tzinfo=UTC))
        .values("day", "model", "tenant__slug")
        .annotate(
            requests=Count("pk"),
            prompt=Sum("prompt_tokens"),
            cached=Sum("cached_tokens"),
            completion=Sum("completion_tokens"),
        )
        .order_by("-day", "model", "tenant__slug")
    )
    return [
        UsageSum(
            day=row["day"],
            model=row["model"],
            tenant=row["tenant__slug"],
            requests=row["requests"],
            prompt_tokens=row["prompt"],
            cached_tokens=row["cached"],
            completion_tokens=row["completion"],
        )
        for row in rows
    ]
