"""When a budget's day, week and month begin: by a tenant's clocks, whatever they do."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest

from metering.money import PERIODS, Rates, period_of


@pytest.mark.parametrize(
    ("period", "zone", "moment", "start", "end"),
    [
        ("day", "UTC", "2026-03-01T12:00", "2026-03-01T00:00", "2026-03-02T00:00"),
        ("month", "UTC", "2026-02-28T23:59", "2026-02-01T00:00", "2026-03-01T00:00"),
        ("month", "UTC", "2024-02-29T00:00", "2024-02-01T00:00", "2024-03-01T00:00"),
        ("month", "UTC", "2026-12-31T23:59", "2026-12-01T00:00", "2027-01-01T00:00"),
        ("week", "UTC", "2026-03-01T12:00", "2026-02-23T00:00", "2026-03-02T00:00"),
        # Berlin's clocks go forward on 2026-03-29: that day has 23 hours; back on 2026-10-25: 25.
        ("day", "Europe/Berlin", "2026-03-29T10:00", "2026-03-28T23:00", "2026-03-29T22:00"),
        ("day", "Europe/Berlin", "2026-10-25T10:00", "2026-10-24T22:00", "2026-10-25T23:00"),
        ("month", "Asia/Kathmandu", "2026-03-31T18:20", "2026-03-31T18:15", "2026-04-30T18:15"),
        ("day", "America/Havana", "2026-11-01T12:00", "2026-11-01T04:00", "2026-11-02T05:00"),
        ("day", "Pacific/Kiritimati", "2026-01-01T11:00", "2026-01-01T10:00", "2026-01-02T10:00"),
    ],
)
def test_fault_35_periods_follow_the_calendar_of_the_zone(
    period: str, zone: str, moment: str, start: str, end: str
) -> None:
    moment_utc = datetime.fromisoformat(moment).replace(tzinfo=UTC)
    bounds = period_of(period, moment_utc, ZoneInfo(zone))
    assert [bound.strftime("%Y-%m-%dT%H:%M") for bound in bounds] == [start, end]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Havana", "Asia/Kathmandu", "UTC"])
@pytest.mark.parametrize("period", PERIODS)
def test_fault_35_each_moment_of_a_year_lies_in_one_period_and_the_next_begins_where_it_ends(
    period: str, zone: str
) -> None:
    moment, last = datetime(2026, 1, 1, tzinfo=UTC), None
    while moment < datetime(2027, 2, 1, tzinfo=UTC):
        start, end = period_of(period, moment, ZoneInfo(zone))
        assert start <= moment < end
        assert last is None or last in ((start, end), (last[0], start))
        last = start, end
        moment += timedelta(minutes=30)


def test_an_unknown_period_is_an_error() -> None:
    with pytest.raises(ValueError, match="day, week, month"):
        period_of("year", datetime.now(UTC), UTC)


def test_costs_are_exact_and_rounded_up_once() -> None:
    rates = Rates.of_prices(*map(Decimal, ("0.15", "0.0375", "0.6", "0.002", "0.006")))
    assert rates == (150_000, 37_500, 600_000, 2_000_000, 6_000_000)
    assert rates.cost_nanos(1_000_000, 0, 0) == 150_000_000
    assert rates.cost_nanos(1_000_000, 1_000_000, 1_000_000) == 637_500_000
    assert rates.cost_nanos(10, 4, 3) == 900 + 150 + 1800
    assert rates.media_nanos(3, 0) == 6_000_000
    assert rates.media_nanos(0, 11_000) == 1_100_000
    assert Rates(audio_minute=1).media_nanos(0, 1) == 1
    assert Rates(1, 0, 0).cost_nanos(1, 0, 0) == 1
    assert Rates().cost_nanos(10**9, 0, 10**9) == 0
