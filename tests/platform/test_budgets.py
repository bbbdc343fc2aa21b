"""Budgets: reserved before, settled after, never exceeded."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest

from common.db import run_in_db_thread
from metering import actions, admission
from metering.access import BudgetSpent, settle
from metering.drain import drain_once
from metering.models import Budget, UsageEntry
from metering.redis_scripts import sync_client
from tenants import actions as tenant_actions
from tenants.actors import SYSTEM_ACTOR
from tests.platform.budgets import budget, caller, enter, price, state, used
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("with_redis")]


async def test_a_request_is_reserved_and_settled_to_what_it_used(world: World) -> None:
    await run_in_db_thread(price)
    of = await run_in_db_thread(budget, world, tokens=1000, amount="0.001")
    got = await enter(caller(world), 100, 200, "r")
    assert got.output_tokens == 200
    now = await state(of)
    assert (now.tokens, now.reserved_tokens, now.nanos, now.reserved_nanos) == (0, 300, 0, 500_000)
    await settle(used(world, "r", got, 100, 50), got)
    await settle(used(world, "r", got, 100, 50), got)  # once, however often
    now = await state(of)
    assert (now.tokens, now.reserved_tokens, now.nanos, now.reserved_nanos) == (150, 0, 200_000, 0)
    assert now.percent == pytest.approx(20)
    await run_in_db_thread(drain_once, sync_client())
    row = await run_in_db_thread(UsageEntry.objects.get)
    assert (row.total_tokens, row.cost_nanos) == (150, 200_000)


async def test_a_request_gets_what_is_left_and_is_cut_there(world: World) -> None:
    await run_in_db_thread(budget, world, tokens=100)
    got = await enter(caller(world), 60, 1000, "r")
    assert got.output_tokens == 40
    await settle(used(world, "r", got, 60, 40), got)
    with pytest.raises(BudgetSpent) as caught:
        await enter(caller(world), 1, 1)
    assert (caught.value.status, caught.value.code) == (429, "insufficient_quota")
    end = (datetime.now(UTC) + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    assert caught.value.retry_after == pytest.approx(end.timestamp() - time.time(), abs=5)


async def test_money_buys_whole_tokens(world: World) -> None:
    await run_in_db_thread(price, output_per_million="3")
    await run_in_db_thread(budget, world, amount="0.000100")
    got = await enter(caller(world), 40, 1000, "r")  # 40 cost 40, and 20 x 3 are left
    assert got.output_tokens == 20
    assert got.prices.cost_nanos(40, 0, 20) == 100_000


async def test_fault_24_200_requests_race_for_the_last_cent_and_overspend_nothing(
    world: World,
) -> None:
    await run_in_db_thread(price)
    of = await run_in_db_thread(
        budget, world, amount="0.01"
    )  # 10,000,000 nanos: 333 requests' worth

    async def one(number: int) -> int:
        got = await enter(caller(world), 10, 500, f"r{number}")
        await asyncio.sleep(0.01)
        output = min(got.output_tokens or 0, 10 + number % 90)
        record = used(world, f"r{number}", got, 10, output)
        await settle(record, got)
        return record.cost_nanos

    results = await asyncio.gather(*[one(n) for n in range(200)], return_exceptions=True)
    paid = [result for result in results if isinstance(result, int)]
    assert not [r for r in results if not isinstance(r, int | BudgetSpent)]
    now = await state(of)
    assert now.nanos == sum(paid) <= 10_000_000
    assert now.reserved_nanos == 0
    # Nobody was refused who could have been served: what is left buys no prompt and one token.
    assert len(paid) == 200 or 10_000_000 - sum(paid) < 12_000


async def test_fault_24_who_finds_the_rest_held_waits_for_it(world: World) -> None:
    of = await run_in_db_thread(budget, world, tokens=100)
    first = await enter(caller(world), 10, 90, "a")
    waiting = asyncio.create_task(enter(caller(world), 10, 50, "b"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await settle(used(world, "a", first, 10, 5), first)
    second = await waiting
    assert second.output_tokens == 50
    assert (await state(of)).reserved_tokens == 60


async def test_who_waited_long_enough_takes_what_there_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "WAIT_TIMEOUT_S", 0.1)
    await run_in_db_thread(budget, world, tokens=100)
    await enter(caller(world), 10, 60, "a")
    assert (await enter(caller(world), 10, 50, "b")).output_tokens == 20
    with pytest.raises(BudgetSpent):
        await enter(caller(world), 10, 50, "c")


async def test_budgets_of_key_and_model_hold_beside_the_tenants(world: World) -> None:
    def prepare() -> None:
        budget(world, tokens=1000)
        budget(world, key=world.key, tokens=100)
        budget(world, model="large", tokens=50, period="month")

    await run_in_db_thread(prepare)
    assert (await enter(caller(world), 10, 500, model="large")).output_tokens == 40
    other = caller(world, key_id=world.rival_key.pk)
    assert (await enter(other, 10, 500, model="small")).output_tokens == 500


async def test_the_keys_that_follow_by_rotation_share_its_budget(world: World) -> None:
    def prepare() -> int:
        budget(world, key=world.key, tokens=100)
        rotated = tenant_actions.rotate_key(actor=world.member, key=world.key)
        again = tenant_actions.rotate_key(actor=world.member, key=rotated.key)
        changed = actions.set_budget(
            actor=SYSTEM_ACTOR, tenant=world.acme, key=again.key, period="day", tokens=120
        )
        assert Budget.objects.get() == changed
        assert changed.api_key == world.key
        return again.key.pk

    later = await run_in_db_thread(prepare)
    got = await enter(caller(world), 10, 50, "a")
    await settle(used(world, "a", got, 10, 50), got)
    assert (await enter(caller(world, key_id=later), 10, 500)).output_tokens == 50
