"""Usage of the last days for the overview page."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

from metering.access import UsageSum, access_all_usage, access_usage
from tenants.access import access_tenants
from tenants.actors import to_actor
from tenants.models import User

DAYS = 14
SUMMED = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


def recent_usage(user: User) -> dict[str, Any]:
    """Sums by tenant and model over the last `DAYS` days (UTC), and each day's tokens.

    Returns: {"days": [`DAYS` dates, oldest first], "daily": [the sums of each day],
    "rows": [{"tenant", "model", the sums, "by_day": [`DAYS` totals]}]}, most tokens first.
    Operators see all tenants, others their own. The sums: "requests", "prompt_tokens",
    "cached_tokens", "completion_tokens".
    """
    today = datetime.now(UTC).date()
    first = today - timedelta(days=DAYS - 1)
    days = [(first + timedelta(days=n)).isoformat() for n in range(DAYS)]
    if to_actor(user).is_operator:
        sums = access_all_usage(user, first=first, last=today)
    else:
        sums = [
            entry
            for tenant in access_tenants(user)
            for entry in access_usage(user, tenant, first=first, last=today)
        ]
    return {"days": days, "daily": _daily(sums, days), "rows": _rows(sums, days)}


def _rows(sums: list[UsageSum], days: list[str]) -> list[dict[str, Any]]:
    grouped: dict[tuple[str, str], list[UsageSum]] = defaultdict(list)
    for entry in sums:
        grouped[entry.tenant, entry.model].append(entry)
    rows = [
        {
            "tenant": tenant,
            "model": model,
            **_sum(entries),
            "by_day": _by_day(entries, days),
        }
        for (tenant, model), entries in grouped.items()
    ]
    return sorted(rows, key=lambda row: (-sum(row["by_day"]), row["tenant"], row["model"]))


def _daily(sums: list[UsageSum], days: list[str]) -> list[dict[str, int]]:
    grouped: dict[str, list[UsageSum]] = defaultdict(list)
    for entry in sums:
        grouped[entry.day.isoformat()].append(entry)
    return [_sum(grouped[day]) for day in days]


def _sum(entries: list[UsageSum]) -> dict[str, int]:
    return {field: sum(getattr(entry, field) for entry in entries) for field in SUMMED}


def _by_day(entries: list[UsageSum], days: list[str]) -> list[int]:
    totals = {entry.day.isoformat(): entry.total_tokens for entry in entries}
    return [totals.get(day, 0) for day in days]
