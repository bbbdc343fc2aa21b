"""Reading usage: sums by day, model and tenant."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta

from django.db.models import Max, QuerySet, Sum

from metering.models import UsageDay, UsageEntry
from tenants.access import AccessSubject, access_role, access_tenants
from tenants.actors import require_operator, to_actor
from tenants.models import Tenant, User

DEFAULT_DAYS = 30


@dataclass(frozen=True)
class UsageSum:
    """Usage of one model on one UTC day, by all tenants or by one."""

    day: date
    model: str
    tenant: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens together."""
        return self.prompt_tokens + self.completion_tokens


def access_usage(
    user: User, tenant: Tenant, *, first: date | None = None, last: date | None = None
) -> list[UsageSum]:
    """Sums by day and model of one tenant, newest day first, for any of its members.

    Days are in UTC, so all have the same length. `first` and `last` are included; by default the
    last 30 days. Raises `NotFound` for users who aren't members.
    """
    access_role(user, tenant)
    return _sums(UsageDay.objects.filter(tenant=tenant), first, last)


def access_all_usage(
    user: User, *, first: date | None = None, last: date | None = None
) -> list[UsageSum]:
    """Sums by day, model and tenant. Raises `PermissionDenied` unless the user is an operator."""
    require_operator(user)
    return _sums(UsageDay.objects.all(), first, last)


def last_used_days(user: User) -> dict[str, datetime]:
    """For each model, the start of the last day (UTC) on which the user's tenants used it.

    Operators see all tenants.
    """
    days = UsageDay.objects.all()
    if not to_actor(user).is_operator:
        days = days.filter(tenant__in=access_tenants(user))
    return dict(days.values_list("model").annotate(Max("start")))


def access_usage_entries(user: AccessSubject, tenant: Tenant) -> QuerySet[UsageEntry]:
    """A tenant's ledger entries, newest first. Raises `NotFound` for users who aren't members."""
    access_role(user, tenant)
    return UsageEntry.objects.filter(tenant=tenant).select_related("api_key")


def _sums(days: QuerySet[UsageDay], first: date | None, last: date | None) -> list[UsageSum]:
    last = last or datetime.now(UTC).date()
    first = first or last - timedelta(days=DEFAULT_DAYS - 1)
    start = datetime.combine(first, time.min, UTC)
    end = datetime.combine(last + timedelta(days=1), time.min, UTC)
    rows = (
        days.filter(start__gte=start, start__lt=end)
        .values("start", "model", "tenant__slug")
        .annotate(
            total=Sum("requests"),
            prompt=Sum("prompt_tokens"),
            cached=Sum("cached_tokens"),
            completion=Sum("completion_tokens"),
        )
        .order_by("-start", "model", "tenant__slug")
    )
    return [
        UsageSum(
            day=row["start"].astimezone(UTC).date(),
            model=row["model"],
            tenant=row["tenant__slug"],
            requests=row["total"],
            prompt_tokens=row["prompt"],
            cached_tokens=row["cached"],
            completion_tokens=row["completion"],
        )
        for row in rows
    ]
