"""The ledger is held against what the engine wrote: what is lost, doubled or wrong is found."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db.models import F

from common.db import run_in_db_thread
from engine.contract.messages import TokenDelta, written_token_counts
from engine.contract.redis_keys import stream_key, written_tokens_key
from metering.access import (
    AdmissionRequest,
    EngineUsage,
    UsageRecord,
    admit,
    settle,
    take_over_request,
)
from metering.admission import takeover_key
from metering.drain import drain_once
from metering.gateway_recovery import send_heartbeat, settle_dead_gateway
from metering.models import UsageEntry
from metering.open_requests import GATEWAY, gateways_key, open_key, response_stored_key
from metering.reconciliation import Reconciliation, prune_counters, reconcile
from metering.redis_scripts import close_redis_link, redis_key, sync_client
from metering.settlement import reconciliation_start_key, sums_key, usage_field
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant
from tests.platform.budgets import budget, caller
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db(transaction=True)]
database = pytest.mark.database


@pytest.fixture
def client(redis_server: str) -> redis.Redis:
    """Counting began a while ago, as it does when the first gateway starts."""
    client = sync_client()
    client.set(reconciliation_start_key(), int(time.time()) - 60)
    return client


def engine_writes(client: redis.Redis, name: str, prompt: int, *outputs: int) -> None:
    """As a replica's outbox script does, in pieces."""
    for index, tokens in enumerate(outputs):
        for end in {1, tokens}:
            delta = TokenDelta(
                request_id=name,
                index=index,
                token_ids=[7] * end,
                start=0,
                num_prompt_tokens=prompt,
            )
            fields = written_token_counts([delta])
            client.hset(written_tokens_key(settings.QUIRE.key_prefix), mapping=fields)


def bill(world: World, name: str, prompt: int, output: int, account: EngineUsage | None) -> None:
    record = UsageRecord(
        request_id=name,
        tenant_id=world.acme.pk,
        key_id=world.key.pk,
        endpoint="chat",
        model="m",
        prompt_tokens=prompt,
        completion_tokens=output,
        status=200,
        started_at=time.time(),
        duration_ms=1.0,
    )

    async def once() -> None:
        await settle(record, account=account)
        await close_redis_link()

    asyncio.run(once())


def lookup(client: redis.Redis) -> Reconciliation:
    return reconcile(client, attempts=1)


def status(*flags: str) -> int:
    try:
        call_command("reconcile_usage", *flags)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@database
def test_what_was_written_and_billed_agrees_in_the_spool_and_in_the_ledger(
    world: World, client: redis.Redis, capsys: Any
) -> None:
    engine_writes(client, "r", 10, 5, 6)
    bill(world, "r", 10, 11, EngineUsage(["r"], 2, is_complete=True))
    for _ in range(2):
        reconciliation = lookup(client)
        (line,) = reconciliation.lines
        assert (line.tenant, line.model) == ("acme", "m")
        assert (line.engine, line.unbilled, line.ledger) == ([10, 11], [0, 0], [10, 11])
        assert reconciliation.is_balanced
        drain_once(client)
    assert status() == 0
    printed = capsys.readouterr().out
    assert "They agree." in printed
    assert [row.split() for row in printed.splitlines()[1:3]] == [
        ["acme", "m", "prompt", "10", "0", "10", "0"],
        ["acme", "m", "output", "11", "0", "11", "0"],
    ]


@database
@pytest.mark.parametrize("harm", ["lost", "more", "less"])
def test_a_ledger_that_lost_or_changed_a_row_is_found(
    world: World, client: redis.Redis, harm: str, capsys: Any
) -> None:
    for name in ("r", "s"):
        engine_writes(client, name, 10, 5)
        bill(world, name, 10, 5, EngineUsage([name], is_complete=True))
    drain_once(client)
    assert lookup(client).is_balanced
    row = UsageEntry.objects.filter(request_id="s")
    if harm == "lost":
        row.delete()
    else:
        row.update(completion_tokens=F("completion_tokens") + (3 if harm == "more" else -3))
    expected = {"lost": [-10, -5], "more": [0, 3], "less": [0, -3]}[harm]
    assert lookup(client).lines[0].difference == expected
    assert status() == 1
    assert "They differ." in capsys.readouterr().out


def test_a_whole_answer_must_be_billed_whole_and_none_with_more_than_was_written(
    world: World, client: redis.Redis
) -> None:
    engine_writes(client, "whole", 10, 9)
    bill(world, "whole", 10, 7, EngineUsage(["whole"], is_complete=True))
    assert lookup(client).lines[0].difference == [0, -2]
    # Behind a stop string, or after its client left, less is right. More never is.
    engine_writes(client, "stopped", 10, 9)
    bill(world, "stopped", 10, 7, EngineUsage(["stopped"]))
    reconciliation = lookup(client)
    assert reconciliation.lines[0].unbilled == [0, 2]
    assert reconciliation.lines[0].difference == [0, -2]
    engine_writes(client, "more", 10, 9)
    bill(world, "more", 10, 12, EngineUsage(["more"]))
    assert lookup(client).lines[0].difference == [0, 1]


def test_a_request_that_nobody_settled_is_named_and_one_that_runs_is_not(
    world: World, client: redis.Redis, capsys: Any
) -> None:
    engine_writes(client, "runs-0", 10, 5)
    engine_writes(client, "runs-1", 10, 5)
    client.zadd(gateways_key(), {GATEWAY: time.time()})
    client.hset(open_key(GATEWAY), "runs", b"x")
    engine_writes(client, "lost", 10, 5)
    reconciliation = lookup(client)
    assert (reconciliation.running, reconciliation.lost, reconciliation.is_balanced) == (
        1,
        ["lost"],
        False,
    )
    assert status("--days", "1") == 1
    assert "never settled: lost." in capsys.readouterr().out
    # The nightly look says so in the log, and forgets it.
    prune_counters(client, reconciliation.lost)
    assert lookup(client).is_balanced


def test_what_comes_after_the_end_is_no_loss(world: World, client: redis.Redis) -> None:
    engine_writes(client, "r", 10, 5)
    bill(world, "r", 10, 5, EngineUsage(["r"]))
    engine_writes(client, "r", 10, 8)  # until the abort has reached it
    reconciliation = lookup(client)
    assert reconciliation.is_balanced
    assert client.hlen(written_tokens_key(settings.QUIRE.key_prefix)) == 0


def test_settling_again_counts_nothing_twice(world: World, client: redis.Redis) -> None:
    engine_writes(client, "r", 10, 5)
    for _ in range(3):
        bill(world, "r", 10, 5, EngineUsage(["r"], is_complete=True))
    drain_once(client)
    assert lookup(client).is_balanced
    assert lookup(client).lines[0].engine == [10, 5]


async def test_fault_49_what_a_dead_gateway_left_is_closed_by_who_buries_it(
    world: World, client: redis.Redis
) -> None:
    asking = AdmissionRequest(
        request_id="r",
        endpoint="chat",
        model="m",
        prompt_tokens=10,
        max_output_tokens=50,
        prompts=[10],
        outputs=2,
        outbox="gone",
        stream=True,
    )
    await run_in_db_thread(budget, world, tokens=1000)
    await admit(caller(world), asking)
    await close_redis_link()
    client.rename(open_key(GATEWAY), open_key("dead"))
    engine_writes(client, "r", 10, 7, 4)
    client.hset(redis_key("progress:gone"), mapping={"r/0": 7, "r/1": 4})
    assert await run_in_db_thread(settle_dead_gateway, client, "dead") == 1
    # Another goes on behind what was billed, under an id of its own.
    engine_writes(client, "r", 10, 20, 4)
    rest = EngineUsage(["r"], 2, is_complete=True, billed_prompt=10, billed_output=11)
    await run_in_db_thread(bill, world, "r.1", 0, 13, rest)
    await run_in_db_thread(drain_once, client)
    reconciliation = await run_in_db_thread(lookup, client)
    assert reconciliation.lines[0].ledger == [10, 24]
    assert reconciliation.is_balanced


@pytest.mark.parametrize("more", [13, 0], ids=["with tokens", "before its first token"])
async def test_fault_49_what_two_dead_gateways_left_of_a_stream_is_billed_once(
    world: World, client: redis.Redis, more: int
) -> None:
    full_request = AdmissionRequest(
        request_id="r",
        endpoint="chat",
        model="m",
        prompt_tokens=10,
        max_output_tokens=50,
        prompts=[10],
        outbox="gone",
        stream=True,
    )
    stream = stream_key("r", settings.QUIRE.key_prefix)
    client.hset(stream, mapping={"open": b"", "told": 1})
    await run_in_db_thread(budget, world, tokens=1000)
    await admit(caller(world), full_request)
    await close_redis_link()
    client.rename(open_key(GATEWAY), open_key("dead"))
    engine_writes(client, "r", 10, 7)
    client.hset(redis_key("progress:gone"), "r/0", 7)
    await run_in_db_thread(settle_dead_gateway, client, "dead")
    rest = replace(
        full_request,
        request_id="r.1",
        prompt_tokens=0,
        prompts=[0],
        outbox="gone too",
        stream_id="r",
        billed=(10, 7),
        previous_token_counts={"r/0": 7},
    )
    await admit(caller(world), rest)
    await close_redis_link()
    client.rename(open_key(GATEWAY), open_key("dead too"))
    if more:
        engine_writes(client, "r", 10, 7 + more)
        client.hset(redis_key("progress:gone too"), "r/0", 7 + more)
    assert await run_in_db_thread(settle_dead_gateway, client, "dead too") == 1
    assert client.hmget(stream, "prompt", "billed") == [b"10", str(7 + more).encode()]
    await run_in_db_thread(drain_once, client)
    reconciliation = await run_in_db_thread(lookup, client)
    assert reconciliation.lines[0].ledger == [10, 7 + more]
    assert reconciliation.is_balanced


@pytest.mark.parametrize(
    ("marks", "billed"),
    [({"open": b""}, (0, 0)), ({"open": b"", "told": 1}, (10, 7)), ({}, (10, 7))],
)
async def test_fault_49_a_stream_is_billed_once_any_of_it_has_left_its_gateway(
    world: World, client: redis.Redis, marks: dict[str, Any], billed: tuple[int, int]
) -> None:
    """Its client can't know of a stream that has told it nothing, and asks anew."""
    asking = AdmissionRequest(
        request_id="r",
        endpoint="chat",
        model="m",
        prompt_tokens=10,
        max_output_tokens=50,
        prompts=[10],
        outbox="gone",
        stream=True,
    )
    if marks:
        client.hset(stream_key("r", settings.QUIRE.key_prefix), mapping=marks)
    await run_in_db_thread(budget, world, tokens=1000)
    await admit(caller(world), asking)
    await close_redis_link()
    client.rename(open_key(GATEWAY), open_key("dead"))
    engine_writes(client, "r", 10, 7)
    client.hset(redis_key("progress:gone"), "r/0", 7)
    assert await run_in_db_thread(settle_dead_gateway, client, "dead") == 1
    await run_in_db_thread(drain_once, client)
    row = await run_in_db_thread(UsageEntry.objects.get)
    assert (row.prompt_tokens, row.completion_tokens) == billed


@pytest.mark.parametrize("answered", [False, True])
async def test_fault_49_an_answer_in_one_piece_is_billed_where_its_client_can_have_it(
    world: World, client: redis.Redis, answered: bool
) -> None:
    asking = AdmissionRequest(
        request_id="r",
        endpoint="chat",
        model="m",
        prompt_tokens=10,
        max_output_tokens=50,
        prompts=[10],
        outbox="gone",
    )
    await run_in_db_thread(budget, world, tokens=1000)
    await admit(caller(world), asking)
    await close_redis_link()
    client.rename(open_key(GATEWAY), open_key("dead"))
    engine_writes(client, "r", 10, 7)
    client.hset(redis_key("progress:gone"), "r/0", 7)
    if answered:
        client.set(response_stored_key("r"), 1)
    assert await run_in_db_thread(settle_dead_gateway, client, "dead") == 1
    await run_in_db_thread(drain_once, client)
    row = await run_in_db_thread(UsageEntry.objects.get)
    assert (row.prompt_tokens, row.completion_tokens) == ((10, 7) if answered else (0, 0))


async def test_fault_49_a_gateway_that_dies_before_a_token_bills_what_was_known_when_it_took_over(
    world: World, client: redis.Redis
) -> None:
    asking = AdmissionRequest(
        request_id="r",
        endpoint="chat",
        model="m",
        prompt_tokens=10,
        max_output_tokens=50,
        prompts=[10],
        outputs=2,
        outbox="gone",
        stream=True,
    )
    await run_in_db_thread(budget, world, tokens=1000)
    await admit(caller(world), asking)
    await close_redis_link()
    client.rename(open_key(GATEWAY), open_key("dead"))
    engine_writes(client, "r", 10, 7, 4)
    taken_over = replace(asking, outbox="gone too", previous_token_counts={"r/0": 7, "r/1": 4})
    assert await take_over_request(caller(world), taken_over, gateway="dead") is not None
    await close_redis_link()
    client.rename(open_key(GATEWAY), open_key("dead too"))
    client.set(takeover_key("r"), "dead too")
    client.hset(redis_key("progress:gone too"), "r/1", 6)
    engine_writes(client, "r", 10, 7, 6)
    assert await run_in_db_thread(settle_dead_gateway, client, "dead too") == 1
    await run_in_db_thread(drain_once, client)
    reconciliation = await run_in_db_thread(lookup, client)
    assert reconciliation.lines[0].ledger == [10, 13]
    assert reconciliation.is_balanced


def test_days_before_counting_began_are_left_out(world: World, client: redis.Redis) -> None:
    client.delete(reconciliation_start_key())
    assert lookup(client).since is None
    send_heartbeat(client, "g")
    assert abs(int(client.get(reconciliation_start_key()) or 0) - time.time()) < 60
    client.set(reconciliation_start_key(), int(time.time()) + 60)
    engine_writes(client, "early", 10, 5)
    bill(world, "early", 10, 5, EngineUsage(["early"], is_complete=True))
    reconciliation = lookup(client)
    assert (reconciliation.lines, reconciliation.is_balanced) == ([], True)


def test_fault_35_a_gateway_that_died_before_the_clock_was_set_back_is_found(
    client: redis.Redis,
) -> None:
    client.zadd(gateways_key(), {"dead": time.time() + 3600})
    keep_beating(client, "g", 0.5)
    assert client.zrange(gateways_key(), 0, -1) == [b"g"]


@pytest.mark.parametrize("ahead_s", [60.0, 7200.0])
def test_fault_28_gateways_that_redis_couldnt_hear_or_whose_clock_jumped_are_not_dead(
    client: redis.Redis, ahead_s: float
) -> None:
    """A primary that takes over may have another clock; one that stood still hears late."""
    last = time.time() - ahead_s
    client.zadd(gateways_key(), {"a": last, "b": last - 0.05, "dead": last - 9})
    client.hset(open_key("b"), "runs", b"x")
    send_heartbeat(client, "a")
    assert set(client.zrange(gateways_key(), 0, -1)) == {b"a", b"b", b"dead"}
    assert client.exists(open_key("b"))
    # Who doesn't come back is found as ever, and what it was silent before counts.
    send_heartbeat(client, "b")
    keep_beating(client, "a", 0.1, dead_after_s=9.05)
    assert client.zrange(gateways_key(), 0, -1) == [b"b", b"a"]
    keep_beating(client, "a", 0.5)
    assert client.zrange(gateways_key(), 0, -1) == [b"a"]


def keep_beating(client: redis.Redis, name: str, seconds: float, dead_after_s: float = 0.3) -> None:
    """As a gateway does that lives."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        send_heartbeat(client, name, dead_after_s=dead_after_s)
        time.sleep(0.01)


def test_sums_that_no_comparison_reads_are_forgotten(world: World, client: redis.Redis) -> None:
    old = f"{datetime.now(UTC) - timedelta(days=60):%Y-%m-%d}"
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    gone = actions.create_tenant(actor=SYSTEM_ACTOR, name="Gone", slug="gone")
    Tenant.objects.filter(pk=gone.pk).update(erased_at=datetime.now(UTC))
    stays = usage_field(today, world.acme.pk, "a model", "output")
    for name in (
        usage_field(old, world.acme.pk, "m", "output"),
        usage_field(today, gone.pk, "m", "output"),
    ):
        client.hset(sums_key(), name, 5)
    client.hset(sums_key(), stays, 5)
    assert [line.tenant for line in lookup(client).lines] == ["acme"]
    prune_counters(client)
    assert client.hkeys(sums_key()) == [stays.encode()]


def test_only_days_that_the_ledger_keeps_are_asked_for(world: World, client: redis.Redis) -> None:
    with pytest.raises(CommandError, match=r"--days must be in \[1, 35\]"):
        call_command("reconcile_usage", "--days", "36")
