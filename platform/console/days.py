"""Days (UTC) that forms name, as moments."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta


def start_of(day: date) -> datetime:
    """Its midnight."""
    return datetime.combine(day, time.min, UTC)


def end_of(day: date) -> datetime:
    """The next midnight; behind the last day that a date can be there is none."""
    if day == date.max:
        return datetime.max.replace(tzinfo=UTC)
    return start_of(day + timedelta(days=1))
