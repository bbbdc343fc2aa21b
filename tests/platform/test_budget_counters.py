"""Counters of budgets: filled anew, given back by the dead, true whatever the clock does."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from common.db import run_in_db_thread
from metering import admission, rules
from metering.access import AdmissionRequest, BudgetSpent, RateLimited, settle, take_over_request
from metering.drain import drain_once
from metering.gateway_recovery import send_heartbeat, settle_dead_gateway
from metering.models import Budget, UsageEntry
from metering.money import FREE
from metering.open_requests import GATEWAY, gateways_key, open_key
from metering.redis_scripts import close_redis_link, load_script, redis_key, redis_link, sync_client
from metering.rules import AdapterUse
from metering.settlement import settle_arguments, settle_keys, spool_key
from metering.usage_record import encode_record
from tenants.models import Tenant
from tests.platform.budgets import budget, caller, enter, price, state, used
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("with_redis")]


async def test_counters_that_redis_lost_come_back_from_ledger_and_spool(world: World) -> None:
    await run_in_db_thread(price)
    of = await run_in_db_thread(budget, world, tokens=10_000, amount="1")
    for number in range(4):
        got = await enter(caller(world), 10, 20, f"r{number}")
        await settle(used(world, f"r{number}", got, 10, 20), got)
        if number == 1:
            await run_in_db_thread(drain_once, sync_client())
    initial_state = await state(of)
    assert (initial_state.tokens, initial_state.nanos) == (120, 200_000)
    (name,) = sync_client().keys(redis_key("budget:*"))
    sync_client().delete(name)
    running = await enter(caller(world), 10, 20, "later")
    now = await state(of)
    assert (now.tokens, now.nanos, now.reserved_tokens) == (120, 200_000, 30)
    # And a request that was let in before is counted, though its reservation is gone.
    sync_client().delete(name, redis_key("reservation:later"))
    await enter(caller(world), 1, 1, "last")
    for _ in range(2):
        await settle(used(world, "later", running, 10, 20), running)
    assert (await state(of)).tokens == 150


async def test_a_new_budget_counts_what_its_period_has_used_already(world: World) -> None:
    def prepare() -> Budget:
        Tenant.objects.filter(pk=world.acme.pk).update(time_zone="Asia/Kathmandu")
        start, _ = rules.period_of("month", datetime.now(UTC), rules.ZoneInfo("Asia/Kathmandu"))
        moments = (start - timedelta(seconds=1), start, start + timedelta(minutes=20))
        for number, index in enumerate([*moments, datetime.now(UTC)]):
            if index <= datetime.now(UTC):
                record = used(
                    world, f"r{number}", admission.UNLIMITED, 10**number, 0, started_at=index
                )
                sync_client().xadd(spool_key(), {"r": encode_record(record)})
        drain_once(sync_client())
        return budget(world, "month", tokens=10_000)

    of = await run_in_db_thread(prepare)
    await enter(caller(world), 1, 1)
    assert (await state(of)).tokens == 1110


async def test_fault_35_a_clock_that_goes_back_over_a_reset_neither_resets_nor_owes(
    world: World,
) -> None:
    of = await run_in_db_thread(budget, world, tokens=100)
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    who = caller(world)
    for started_at, prompt in ((midnight - 600, 60), (midnight + 600, 30), (midnight - 300, 30)):
        got = await enter(who, prompt, 10, f"{started_at}", started_at=started_at)
        await settle(used(world, f"{started_at}", got, prompt, 0, started_at=started_at), got)
    with pytest.raises(BudgetSpent):
        await enter(who, 11, 0, started_at=midnight - 100)
    assert (await enter(who, 60, 20, started_at=midnight + 700)).output_tokens == 10
    assert (await state(of)).tokens == 30


async def test_a_price_holds_from_its_moment_on(world: World) -> None:
    now = datetime.now(UTC)

    def prepare() -> None:
        price()
        price(valid_from=now + timedelta(hours=1), input_per_million="7")

    await run_in_db_thread(prepare)
    assert (await enter(caller(world))).prices.input == 1_000_000
    later = await enter(caller(world), started_at=time.time() + 3700)
    assert later.prices.input == 7_000_000
    assert (await enter(caller(world), model="other")).prices == FREE
    tone = AdapterUse("tone", "d" * 64, ("m:tone",))
    adapter = await enter(caller(world), model="m", adapter=tone)
    assert adapter.prices.output == 2_000_000


async def test_no_more_run_at_a_time_than_allowed(world: World) -> None:
    who = caller(world, max_running_requests=3, key_max_running_requests=2)
    got = [await enter(who, request_id=f"r{n}") for n in range(2)]
    with pytest.raises(RateLimited, match=r"for this key: 2 running requests"):
        await enter(who)
    other = caller(world, max_running_requests=3, key_id=world.rival_key.pk)
    await enter(other)
    with pytest.raises(RateLimited, match=r"for this tenant: 3 running requests"):
        await enter(other)
    await settle(used(world, "r0", got[0], 10, 1), got[0])
    await enter(who)


async def test_what_a_killed_gateway_held_is_settled_by_another(world: World) -> None:
    await run_in_db_thread(price)
    of = await run_in_db_thread(budget, world, tokens=1000, amount="1")
    who = caller(world, max_running_requests=1)
    await enter(who, 10, 500, "r", outbox="gone", stream=True)
    client = sync_client()
    # As if another process had let it in, which is silent for long.
    client.rename(open_key(GATEWAY), open_key("dead"))
    client.zadd(gateways_key(), {"dead": time.time() - 60, GATEWAY: time.time()})
    client.hset(redis_key("progress:gone"), "r/0", 7)
    await run_in_db_thread(send_heartbeat, client)
    now = await state(of)
    assert (now.tokens, now.reserved_tokens) == (17, 0)
    assert (now.nanos, now.reserved_nanos) == (24_000, 0)
    await enter(who)
    await run_in_db_thread(drain_once, client)
    row = await run_in_db_thread(UsageEntry.objects.get)
    assert (row.request_id, row.prompt_tokens, row.completion_tokens) == ("r", 10, 7)
    assert (row.status, row.finish_reason, row.stream) == (499, "abort", True)
    assert await run_in_db_thread(settle_dead_gateway, client, "dead") == 0


async def test_a_request_that_had_not_begun_when_its_gateway_died_costs_nothing(
    world: World,
) -> None:
    of = await run_in_db_thread(budget, world, tokens=1000)
    await enter(caller(world), 10, 500, "r", outbox="gone")
    await run_in_db_thread(settle_dead_gateway, sync_client(), GATEWAY)
    now = await state(of)
    assert (now.tokens, now.reserved_tokens) == (0, 0)


async def test_fault_28_what_was_settled_while_redis_was_away_is_given_back_when_it_returns(
    world: World, settings: Any
) -> None:
    of = await run_in_db_thread(budget, world, tokens=1000)
    got = await enter(caller(world), 10, 100, "r")
    url = settings.REDIS_URL
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    await settle(used(world, "r", got, 10, 20), got)
    settings.REDIS_URL = url
    assert await run_in_db_thread(UsageEntry.objects.count) == 1
    await run_in_db_thread(send_heartbeat, sync_client())
    now = await state(of)
    assert (now.tokens, now.reserved_tokens) == (30, 0)
    await run_in_db_thread(drain_once, sync_client())
    assert await run_in_db_thread(UsageEntry.objects.count) == 1


async def test_without_redis_the_ledger_tells_how_a_budget_stands(
    world: World, settings: Any
) -> None:
    of = await run_in_db_thread(budget, world, tokens=1000)
    got = await enter(caller(world), 10, 100, "r")
    await settle(used(world, "r", got, 10, 20), got)
    await run_in_db_thread(drain_once, sync_client())
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    assert (await state(of)).tokens == 30


async def test_a_refusal_carries_the_rate_limits_headers(world: World) -> None:
    who = caller(world, requests_per_minute=1)
    await enter(who)
    with pytest.raises(RateLimited) as caught:
        await enter(who)
    headers = caught.value.headers
    assert headers["x-ratelimit-limit-requests"] == "1"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    await close_redis_link()
    assert redis_link()


async def test_fault_49_a_killed_gateways_requests_are_billed_without_any_limit_too(
    world: World,
) -> None:
    await enter(caller(world), 10, 500, "r", outbox="gone", stream=True)
    await redis_link().execute("PING")  # what nobody waits for was sent before
    client = sync_client()
    client.rename(open_key(GATEWAY), open_key("dead"))
    client.hset(redis_key("progress:gone"), "r/0", 7)
    assert await run_in_db_thread(settle_dead_gateway, client, "dead") == 1
    await run_in_db_thread(drain_once, client)
    row = await run_in_db_thread(UsageEntry.objects.get)
    assert (row.request_id, row.prompt_tokens, row.completion_tokens) == ("r", 10, 7)


async def test_fault_49_a_killed_gateways_whole_answers_reached_nobody_and_cost_nothing(
    world: World,
) -> None:
    of = await run_in_db_thread(budget, world, tokens=1000)
    await enter(caller(world), 10, 500, "r", outbox="gone")
    client = sync_client()
    client.rename(open_key(GATEWAY), open_key("dead"))
    client.hset(redis_key("progress:gone"), "r/0", 7)
    assert await run_in_db_thread(settle_dead_gateway, client, "dead") == 1
    assert ((await state(of)).tokens, (await state(of)).reserved_tokens) == (0, 0)
    await run_in_db_thread(drain_once, client)
    row = await run_in_db_thread(UsageEntry.objects.get)
    assert (row.prompt_tokens, row.completion_tokens, row.status) == (0, 0, 499)


async def test_fault_49_a_request_that_was_taken_over_is_settled_by_its_taker_alone(
    world: World,
) -> None:
    of = await run_in_db_thread(budget, world, tokens=1000)
    got = await enter(caller(world), 10, 500, "r", outbox="gone", stream=True)
    client = sync_client()
    client.rename(open_key(GATEWAY), open_key("other"))
    asking = AdmissionRequest(
        request_id="r",
        endpoint="e",
        model="m",
        prompt_tokens=10,
        max_output_tokens=500,
        prompts=[10],
    )
    consumed = await take_over_request(caller(world), asking, gateway="other")
    assert consumed is not None
    # The other gateway wasn't dead: it settles, and so does whoever thought that it was.
    late = settle_arguments(used(world, "r", got, 10, 3), b"never", {}, "other")
    text, _ = load_script("settle")
    names = settle_keys("r", "other")
    assert client.eval(text, len(names), *names, *late) == -1
    assert await run_in_db_thread(settle_dead_gateway, client, "other") == 0
    assert (await state(of)).reserved_tokens == 510
    await settle(used(world, "r", got, 10, 40), consumed)
    assert ((await state(of)).tokens, (await state(of)).reserved_tokens) == (50, 0)
    await run_in_db_thread(drain_once, client)
    row = await run_in_db_thread(UsageEntry.objects.get)
    assert (row.prompt_tokens, row.completion_tokens) == (10, 40)
    assert await take_over_request(caller(world), asking, gateway=GATEWAY) is None
