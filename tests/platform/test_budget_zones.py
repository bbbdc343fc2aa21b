"""Budgets by a tenant's clocks: daylight saving, far zones, zones that change, clocks that go back.

Beside an independent reckoning, which adds up all requests whose date by those clocks is the same.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from common.db import run_in_db_thread
from metering import admission
from metering import budgets as seeding
from metering.access import Admission, BudgetSpent, settle
from metering.budgets import states_of
from metering.drain import drain_once
from metering.models import Budget
from metering.redis_scripts import redis_key, sync_client
from metering.rules import AdapterUse
from metering.settlement import spool_key
from metering.usage_record import encode_record
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant
from tests.platform.budgets import budget, caller, enter, state, used
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db(transaction=True)]
LIMITS = {"day": 400, "week": 900, "month": 1600}
ZONES = ("Europe/Berlin", "America/Havana", "Pacific/Kiritimati", "Etc/GMT+12", "Asia/Kathmandu")


@pytest.fixture(autouse=True)
def wait_for_nothing(with_redis: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that finds the rest reserved takes what remains at once."""
    monkeypatch.setattr(admission, "WAIT_TIMEOUT_S", 0.0)


@dataclass
class Asked:
    """One request: what it used, or holds while it runs."""

    name: str
    moment: datetime
    got: Admission
    prompt: int
    tokens: int


@dataclass
class Reckoning:
    """All requests, added up by date."""

    zone: ZoneInfo
    asked: list[Asked] = field(default_factory=list)

    def date(self, period: str, moment: datetime) -> Any:
        local = moment.astimezone(self.zone).date()
        return {"day": local, "week": local.isocalendar()[:2], "month": (local.year, local.month)}[
            period
        ]

    def spent(self, period: str, moment: datetime) -> int:
        of = self.date(period, moment)
        return sum(
            asked_request.tokens
            for asked_request in self.asked
            if self.date(period, asked_request.moment) == of
        )

    def remaining(self, moment: datetime) -> int:
        return min(limit - self.spent(period, moment) for period, limit in LIMITS.items())


async def move(world: World, zone: str) -> None:
    def change() -> None:
        tenant = Tenant.objects.get(pk=world.acme.pk)
        actions.update_tenant(actor=SYSTEM_ACTOR, tenant=tenant, time_zone=zone)

    await run_in_db_thread(change)


@pytest.mark.parametrize(
    ("zone", "edge"),
    [
        ("Europe/Berlin", "2026-03-29T01:00"),  # forward; the month ends two days later
        ("Europe/Berlin", "2026-10-25T01:00"),  # back
        ("America/Havana", "2026-03-08T05:00"),  # forward at midnight: there is none
        ("America/Havana", "2026-11-01T05:00"),  # back: a midnight twice, and a month's first day
        ("Pacific/Kiritimati", "2026-03-31T10:00"),  # UTC+14
        ("Etc/GMT+12", "2026-06-01T12:00"),  # UTC-12: a Monday and a month's first day
    ],
)
async def test_fault_35_budgets_are_what_dates_say(world: World, zone: str, edge: str) -> None:
    rng = random.Random(f"{zone} {edge}")
    await move(world, zone)
    budgets = [await run_in_db_thread(budget, world, per, tokens=n) for per, n in LIMITS.items()]
    reckoning, running = Reckoning(ZoneInfo(zone)), list[Asked]()
    middle = datetime.fromisoformat(edge).replace(tzinfo=UTC)
    now, refused = middle - timedelta(hours=26), 0
    for step in range(90):
        now += timedelta(minutes=rng.choice((5, 30, 70)))
        if rng.random() < 0.06:
            now -= timedelta(hours=1)  # somebody sets the clock back
        if rng.random() < 0.06:
            other = rng.choice(ZONES)
            await move(world, other)
            reckoning.zone = ZoneInfo(other)
        if rng.random() < 0.1:
            await run_in_db_thread(drain_once, sync_client())
        prompt, output, name = rng.randrange(1, 40), rng.randrange(1, 60), f"r{step}"
        remaining = reckoning.remaining(now) - prompt
        try:
            got = await enter(caller(world), prompt, output, name, started_at=now.timestamp())
        except BudgetSpent:
            assert remaining < 1, (step, now, remaining)
            refused += 1
        else:
            assert got.output_tokens == min(output, remaining), (step, now, remaining)
            one = Asked(name, now, got, prompt, prompt + min(output, remaining))
            reckoning.asked.append(one)
            running.append(one)
        while running and (rng.random() < 0.6 or len(running) > 4):
            await finish(world, running.pop(rng.randrange(len(running))), rng)
    for one in running:
        await finish(world, one, rng)
    assert refused > 3
    for budget_now in await run_in_db_thread(states_of, budgets, now):
        assert budget_now.tokens == reckoning.spent(budget_now.budget.period, now)
        assert budget_now.reserved_tokens == 0


async def finish(world: World, one: Asked, rng: random.Random) -> None:
    one.tokens = one.prompt + rng.randint(0, one.tokens - one.prompt)
    timestamp = one.moment.timestamp()
    output = one.tokens - one.prompt
    await settle(used(world, one.name, one.got, one.prompt, output, started_at=timestamp), one.got)


async def test_a_budget_that_is_set_while_requests_run_counts_them(world: World) -> None:
    free = await enter(caller(world), 10, 500, "free")
    of = await run_in_db_thread(budget, world, tokens=600)
    got = await enter(caller(world), 10, 500, "next")
    assert got.output_tokens == 600 - 510 - 10
    await settle(used(world, "next", got, 10, 0), got)
    second = await run_in_db_thread(budget, world, "month", tokens=1000)
    await enter(caller(world), 1, 1, "last")
    assert (await state(second)).reserved_tokens == 510 + 2
    for _ in range(2):
        await settle(used(world, "free", free, 10, 20), free)
    for one_budget in (of, second):
        now = await state(one_budget)
        assert (now.tokens, now.reserved_tokens) == (10 + 30, 2)


async def test_fault_35_another_time_zone_and_back_forgets_nothing(world: World) -> None:
    of = await run_in_db_thread(budget, world, "month", tokens=1000)
    for number, zone in enumerate(("UTC", "Pacific/Kiritimati", "UTC", "Etc/GMT+12", "UTC")):
        await move(world, zone)
        got = await enter(caller(world), 10, 90, f"r{number}")
        await settle(used(world, f"r{number}", got, 10, 90), got)
        assert (await state(of)).tokens == 100 * (number + 1)


async def test_fault_35_a_clock_that_is_days_behind_is_answered(world: World) -> None:
    of = await run_in_db_thread(budget, world, tokens=100)
    late = datetime.now(UTC) - timedelta(days=9)
    async with asyncio.timeout(60):
        got = await enter(caller(world), 10, 500, "r", started_at=late.timestamp())
    assert got.output_tokens == 90
    assert (await state(of)).reserved_tokens == 0, "of another day"


async def test_budgets_of_adapters_come_back_from_the_ledger(world: World) -> None:
    tone = AdapterUse("tone", "d" * 64)

    def prepare() -> list[Budget]:
        return [budget(world, model=name, tokens=500) for name in ("tone", "m:tone", "m", "other")]

    budgets = await run_in_db_thread(prepare)
    for number in range(3):
        name = f"r{number}"
        got = await enter(caller(world), 10, 20, name, adapter=tone)
        await settle(used(world, name, got, 10, 20, adapter="tone"), got)
        if number == 1:
            await run_in_db_thread(drain_once, sync_client())
    sync_client().delete(*sync_client().keys(redis_key("budget:*")))
    await enter(caller(world), 1, 1, "last", adapter=tone)
    assert [(await state(budget)).tokens for budget in budgets] == [90, 90, 90, 0]


async def test_a_budget_is_counted_though_much_waits_for_the_database(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "PART", 2)
    for number in range(5):
        got = await enter(caller(world), 10, 20, f"r{number}")
        await settle(used(world, f"r{number}", got, 10, 20), got)
        if number == 2:
            await run_in_db_thread(drain_once, sync_client())
            sync_client().xadd(
                spool_key(), {"r": encode_record(used(world, "r0", got, 10, 20))}
            )  # delivered twice
    of = await run_in_db_thread(budget, world, tokens=1000)
    await enter(caller(world), 1, 1, "last")
    assert (await state(of)).tokens == 150
