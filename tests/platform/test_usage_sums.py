"""Sums over the ledger."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest
from django.db.models import Sum

from metering.access import WIDTHS, UsageQuery, access_all_usage, access_usage, report
from metering.ledger import insert_records
from metering.models import UsageDay, UsageEntry, UsageHour
from metering.reconciliation import check_day, verify_rollups
from metering.retention import delete_expired_usage
from metering.usage_record import UsageRecord
from tenants import actions as tenant_actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def used(tenant: Tenant, timestamp: datetime, model: str = "m", tokens: int = 10) -> None:
    record = UsageRecord(
        request_id=f"{tenant}-{model}-{timestamp.isoformat()}-{UsageEntry.objects.count()}",
        tenant_id=tenant.pk,
        endpoint="chat",
        model=model,
        prompt_tokens=tokens,
        cached_tokens=tokens // 2,
        completion_tokens=1,
        status=200,
        started_at=timestamp,
        duration_ms=1,
    )
    insert_records([record])


def test_usage_is_summed_by_day_and_model(world: World) -> None:
    for hour in (0, 12, 23):
        used(world.acme, datetime(2026, 3, 1, hour, 30, tzinfo=UTC))
    used(world.acme, datetime(2026, 3, 1, 5, tzinfo=UTC), model="other", tokens=4)
    used(world.acme, datetime(2026, 3, 2, 0, tzinfo=UTC))
    rows = access_usage(world.member, world.acme, first=date(2026, 3, 1), last=date(2026, 3, 2))
    assert [(r.day.day, r.model, r.requests, r.prompt_tokens, r.cached_tokens) for r in rows] == [
        (2, "m", 1, 10, 5),
        (1, "m", 3, 30, 15),
        (1, "other", 1, 4, 2),
    ]
    assert rows[1].total_tokens == 33


def test_fault_35_days_are_utcs_whatever_daylight_saving_does(world: World) -> None:
    """Berlin's clocks went forward on 2026-03-29; the months' ends fall on UTC's days too."""
    summer = timezone(timedelta(hours=2))
    used(world.acme, datetime(2026, 3, 29, 1, 59, tzinfo=summer))  # the 28th in UTC
    used(world.acme, datetime(2026, 3, 29, 2, 1, tzinfo=summer))
    used(world.acme, datetime(2026, 3, 31, 23, 59, 59, 999_999, tzinfo=UTC))
    used(world.acme, datetime(2026, 4, 1, 0, 0, tzinfo=UTC))
    march = access_usage(world.owner, world.acme, first=date(2026, 3, 1), last=date(2026, 3, 31))
    april = access_usage(world.owner, world.acme, first=date(2026, 4, 1), last=date(2026, 4, 30))
    assert [row.day.day for row in march] == [31, 29, 28]
    assert [row.day.day for row in april] == [1]


def test_by_default_the_last_thirty_days_count(world: World) -> None:
    now = datetime.now(UTC)
    used(world.acme, now)
    used(world.acme, now - timedelta(days=29))
    used(world.acme, now - timedelta(days=31))
    assert sum(row.requests for row in access_usage(world.owner, world.acme)) == 2


def test_operators_see_tenants_side_by_side(world: World) -> None:
    now = datetime.now(UTC)
    used(world.acme, now)
    used(world.rival, now)
    rows = access_all_usage(world.operator)
    assert [(row.tenant, row.requests) for row in rows] == [("acme", 1), ("rival", 1)]


def test_no_usage_is_an_empty_list(world: World) -> None:
    assert access_usage(world.owner, world.acme) == []


def test_roll_ups_are_the_ledgers_sums_however_often_a_record_comes(world: World) -> None:
    records = [
        UsageRecord(
            request_id=f"r{number % 40}",
            tenant_id=[world.acme.pk, world.rival.pk][number % 2],
            key_id=[None, world.key.pk][number % 4 // 2],
            endpoint=["chat", "embeddings"][number % 3 // 2],
            model="m" if number % 40 < 30 else "n",
            prompt_tokens=number % 40,
            cached_tokens=number % 40 // 3,
            completion_tokens=7,
            cost_nanos=11,
            status=200,
            started_at=datetime(2026, 3, 28, 22, tzinfo=UTC) + timedelta(minutes=7 * (number % 40)),
            duration_ms=1,
        )
        for number in range(60)
    ]
    insert_records(records[:25])
    insert_records(records[20:])  # some of them again
    for table, hours in ((UsageHour, 5), (UsageDay, 2)):
        assert len(set(table.objects.values_list("start", flat=True))) == hours
        for tenant in (world.acme, world.rival):
            of = UsageEntry.objects.filter(tenant=tenant)
            for field in ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos"):
                summed = table.objects.filter(tenant=tenant).aggregate(sum=Sum(field))
                assert summed == of.aggregate(sum=Sum(field))
            requests = table.objects.filter(tenant=tenant).aggregate(sum=Sum("requests"))["sum"]
            assert requests == of.count() == 20


def sums() -> set[tuple[Any, ...]]:
    """All sums by hour and day, without their ids."""
    return {
        tuple(row.items())
        for table in (UsageHour, UsageDay)
        for row in ({**row, "id": table.__name__} for row in table.objects.values())
    }


def test_sums_that_are_the_ledgers_stay_as_they_are(world: World) -> None:
    now = datetime.now(UTC)
    for tenant in (world.acme, world.rival):
        used(tenant, now)
        used(tenant, now - timedelta(days=1), model="other")
    initial_sums = sums()
    ids = set(UsageHour.objects.values_list("pk", flat=True))
    assert verify_rollups(now=now) == []
    assert sums() == initial_sums
    assert set(UsageHour.objects.values_list("pk", flat=True)) == ids


def test_sums_that_are_lost_or_wrong_are_made_anew_from_the_ledger(world: World) -> None:
    now = datetime(2026, 3, 5, 12, tzinfo=UTC)
    for hours in (1, 2, 30, 31):
        used(world.acme, now - timedelta(hours=hours))
        used(world.rival, now - timedelta(hours=hours), model="n")
    right = sums()
    UsageHour.objects.filter(tenant=world.acme).delete()
    UsageDay.objects.filter(start__date=date(2026, 3, 4)).update(requests=77, cost_nanos=1)
    UsageDay.objects.create(
        tenant=world.rival,
        start=datetime(2026, 3, 5, tzinfo=UTC),
        model="ghost",
        endpoint="chat",
        requests=1,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        cost_nanos=0,
    )
    days = verify_rollups(now=now)
    assert [day.date() for day in days] == [date(2026, 3, 5), date(2026, 3, 4)]
    assert sums() == right
    assert verify_rollups(now=now) == []


def test_sums_outlive_a_ledger_that_is_kept_for_some_days(world: World) -> None:
    day = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    old = day - timedelta(days=40)
    used(world.acme, old + timedelta(hours=3))
    tenant_actions.update_tenant(actor=SYSTEM_ACTOR, tenant=world.acme, keep_usage_days=35)
    right = sums()
    assert delete_expired_usage() == 1
    assert check_day(old)
    assert sums() == right


def test_usage_is_told_by_adapter(world: World) -> None:
    hour = datetime(2026, 3, 1, 5, tzinfo=UTC)
    baseline = {"tenant_id": world.acme.pk, "endpoint": "chat", "model": "m", "prompt_tokens": 1}
    baseline |= {"completion_tokens": 2, "status": 200, "started_at": hour, "duration_ms": 1}
    for number, adapter in enumerate(("", "tone", "tone", "law")):
        insert_records([UsageRecord(request_id=f"r{number}", adapter=adapter, **baseline)])
    for width in WIDTHS:
        question = UsageQuery(
            start=hour, end=hour + timedelta(hours=1), width=width, group_by=("model", "adapter")
        )
        if width == "1d":
            day = hour.replace(hour=0)
            question = replace(question, start=day, end=day + timedelta(days=1))
        asked = report(question)
        assert {query.start for query in asked} == {question.start}
        groups = [(*match.group.values(), match.requests) for match in asked]
        assert groups == [("m", None, 1), ("m", "law", 1), ("m", "tone", 2)]
