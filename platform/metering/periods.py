"""Days, weeks and months of budgets, in a tenant's time zone."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta, tzinfo

PERIODS = ("day", "week", "month")


def period_of(period: str, moment: datetime, zone: tzinfo) -> tuple[datetime, datetime]:
    """Where the period around a moment begins and ends, in UTC; the end isn't included.

    Periods begin at midnight by the zone's clocks, weeks on Mondays, so a day may have 23 or 25
    hours. A midnight that comes twice counts the first time, one that is left out when the clocks
    have passed it.
    """
    day = moment.astimezone(zone).date()
    if period == "day":
        first, last = day, day + timedelta(days=1)
    elif period == "week":
        first = day - timedelta(days=day.weekday())
        last = first + timedelta(days=7)
    elif period == "month":
        first = day.replace(day=1)
        last = (first + timedelta(days=32)).replace(day=1)
    else:
        raise ValueError(f"period must be one of {', '.join(PERIODS)}, got {period!r}.")
    begin, end = (datetime.combine(each, time.min, zone).astimezone(UTC) for each in (first, last))
    return begin, end
