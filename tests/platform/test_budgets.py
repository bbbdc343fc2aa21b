"""Budgets: reserved before, settled after, never exceeded."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from engine.contract.errors import InvalidRequest
from metering import actions, admission, alerts, rules
from metering.access import Admission, BudgetSpent, RateLimited, UsageRecord, admit, settle
from metering.adapters import AdapterUse
from metering.drain import drain_once
from metering.gateways import GATEWAY, open_key
from metering.keeper import beat, bury, gateways_key
from metering.models import Budget, UsageEntry
from metering.records import encode_record
from metering.redis_clients import close_redis_link, key, redis_link, sync_client
from metering.settlement import spool_key
from metering.spending import BudgetState, states_of
from tenants import actions as tenant_actions
from tenants.actors import SYSTEM
from tenants.authentication import Caller
from tenants.db_threads import in_db_thread
from tenants.errors import NotFound, PermissionDenied
from tenants.models import AuditEntry, Tenant
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db(transaction=True)]
database = pytest.mark.database


@pytest.fixture(autouse=True)
def _redis(live_redis: str) -> Iterator[None]:
    """A real Redis under a fresh prefix."""
    yield
    connection.close()


def caller(world: World, **values: Any) -> Caller:
    plain: dict[str, Any] = {
        "tenant_id": world.acme.pk,
        "tenant": "acme",
        "key_id": world.key.pk,
        "user_id": None,
        "cache_namespace": "",
        "weight": 1.0,
        "max_priority": 0,
        "scopes": frozenset(),
        "requests_per_minute": None,
        "tokens_per_minute": None,
    }
    return Caller(**{**plain, **values})


def budget(world: World, period: str = "day", **values: Any) -> Budget:
    return actions.set_budget(actor=SYSTEM, tenant=world.acme, period=period, **values)


def price(model: str = "m", **values: Any) -> None:
    plain = {"input_per_million": "1", "output_per_million": "2", "cached_per_million": "0.5"}
    actions.set_price(actor=SYSTEM, model=model, **{**plain, **values})


async def enter(
    who: Caller, prompt: int = 10, output: int = 10, request_id: str = "", **values: Any
) -> Admission:
    return await admit(
        who,
        request_id=request_id or uuid.uuid4().hex,
        endpoint="chat",
        model=values.pop("model", "m"),
        prompt_tokens=prompt,
        max_output_tokens=output,
        **values,
    )


def used(
    world: World, request_id: str, got: Admission, prompt: int, output: int, **values: Any
) -> UsageRecord:
    plain: dict[str, Any] = {
        "request_id": request_id,
        "tenant_id": world.acme.pk,
        "key_id": world.key.pk,
        "endpoint": "chat",
        "model": "m",
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "cost_nanos": got.rates.cost_nanos(prompt, 0, output),
        "status": 200,
        "started_at": time.time(),
        "duration_ms": 1.0,
    }
    return UsageRecord(**{**plain, **values})


async def state(of: Budget) -> BudgetState:
    (found,) = await in_db_thread(states_of, [of])
    return found


async def test_a_request_is_reserved_and_settled_to_what_it_used(world: World) -> None:
    await in_db_thread(price)
    of = await in_db_thread(budget, world, tokens=1000, amount="0.001")
    got = await enter(caller(world), 100, 200, "r")
    assert got.output_tokens == 200
    now = await state(of)
    assert (now.tokens, now.held_tokens, now.nanos, now.held_nanos) == (0, 300, 0, 500_000)
    await settle(used(world, "r", got, 100, 50), got)
    await settle(used(world, "r", got, 100, 50), got)  # once, however often
    now = await state(of)
    assert (now.tokens, now.held_tokens, now.nanos, now.held_nanos) == (150, 0, 200_000, 0)
    assert now.percent == pytest.approx(20)
    await in_db_thread(drain_once, sync_client())
    row = await in_db_thread(UsageEntry.objects.get)
    assert (row.total_tokens, row.cost_nanos) == (150, 200_000)


async def test_a_request_gets_what_is_left_and_is_cut_there(world: World) -> None:
    await in_db_thread(budget, world, tokens=100)
    got = await enter(caller(world), 60, 1000, "r")
    assert got.output_tokens == 40
    await settle(used(world, "r", got, 60, 40), got)
    with pytest.raises(BudgetSpent) as caught:
        await enter(caller(world), 1, 1)
    assert (caught.value.status, caught.value.code) == (429, "insufficient_quota")
    end = (datetime.now(UTC) + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    assert caught.value.retry_after == pytest.approx(end.timestamp() - time.time(), abs=5)


async def test_money_buys_whole_tokens(world: World) -> None:
    await in_db_thread(price, output_per_million="3")
    await in_db_thread(budget, world, amount="0.000100")
    got = await enter(caller(world), 40, 1000, "r")  # 40 cost 40, and 20 x 3 are left
    assert got.output_tokens == 20
    assert got.rates.cost_nanos(40, 0, 20) == 100_000


async def test_fault_24_200_requests_race_for_the_last_cent_and_overspend_nothing(
    world: World,
) -> None:
    await in_db_thread(price)
    of = await in_db_thread(budget, world, amount="0.01")  # 10,000,000 nanos: 333 requests' worth

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
    assert now.held_nanos == 0
    # Nobody was refused who could have been served: what is left buys no prompt and one token.
    assert len(paid) == 200 or 10_000_000 - sum(paid) < 12_000


async def test_fault_24_who_finds_the_rest_held_waits_for_it(world: World) -> None:
    of = await in_db_thread(budget, world, tokens=100)
    first = await enter(caller(world), 10, 90, "a")
    waiting = asyncio.create_task(enter(caller(world), 10, 50, "b"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await settle(used(world, "a", first, 10, 5), first)
    second = await waiting
    assert second.output_tokens == 50
    assert (await state(of)).held_tokens == 60


async def test_who_waited_long_enough_takes_what_there_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "WAIT_S", 0.1)
    await in_db_thread(budget, world, tokens=100)
    await enter(caller(world), 10, 60, "a")
    assert (await enter(caller(world), 10, 50, "b")).output_tokens == 20
    with pytest.raises(BudgetSpent):
        await enter(caller(world), 10, 50, "c")


async def test_budgets_of_key_and_model_hold_beside_the_tenants(world: World) -> None:
    def prepare() -> None:
        budget(world, tokens=1000)
        budget(world, key=world.key, tokens=100)
        budget(world, model="large", tokens=50, period="month")

    await in_db_thread(prepare)
    assert (await enter(caller(world), 10, 500, model="large")).output_tokens == 40
    other = caller(world, key_id=world.rival_key.pk)
    assert (await enter(other, 10, 500, model="small")).output_tokens == 500


async def test_the_keys_that_follow_by_rotation_share_its_budget(world: World) -> None:
    def prepare() -> int:
        budget(world, key=world.key, tokens=100)
        made = tenant_actions.rotate_key(actor=world.member, key=world.key)
        again = tenant_actions.rotate_key(actor=world.member, key=made.key)
        changed = actions.set_budget(
            actor=SYSTEM, tenant=world.acme, key=again.key, period="day", tokens=120
        )
        assert Budget.objects.get() == changed
        assert changed.api_key == world.key
        return again.key.pk

    later = await in_db_thread(prepare)
    got = await enter(caller(world), 10, 50, "a")
    await settle(used(world, "a", got, 10, 50), got)
    assert (await enter(caller(world, key_id=later), 10, 500)).output_tokens == 50


async def test_counters_that_redis_lost_come_back_from_ledger_and_spool(world: World) -> None:
    await in_db_thread(price)
    of = await in_db_thread(budget, world, tokens=10_000, amount="1")
    for number in range(4):
        got = await enter(caller(world), 10, 20, f"r{number}")
        await settle(used(world, f"r{number}", got, 10, 20), got)
        if number == 1:
            await in_db_thread(drain_once, sync_client())
    before = await state(of)
    assert (before.tokens, before.nanos) == (120, 200_000)
    (name,) = sync_client().keys(key("budget:*"))
    sync_client().delete(name)
    running = await enter(caller(world), 10, 20, "later")
    now = await state(of)
    assert (now.tokens, now.nanos, now.held_tokens) == (120, 200_000, 30)
    # And a request that was let in before is counted, though its reservation is gone.
    sync_client().delete(name, key("reservation:later"))
    await enter(caller(world), 1, 1, "last")
    for _ in range(2):
        await settle(used(world, "later", running, 10, 20), running)
    assert (await state(of)).tokens == 150


async def test_a_new_budget_counts_what_its_period_has_used_already(world: World) -> None:
    def prepare() -> Budget:
        Tenant.objects.filter(pk=world.acme.pk).update(time_zone="Asia/Kathmandu")
        start, _ = rules.period_of("month", datetime.now(UTC), rules.ZoneInfo("Asia/Kathmandu"))
        moments = (start - timedelta(seconds=1), start, start + timedelta(minutes=20))
        for number, at in enumerate([*moments, datetime.now(UTC)]):
            if at <= datetime.now(UTC):
                record = used(
                    world, f"r{number}", admission.UNLIMITED, 10**number, 0, started_at=at
                )
                sync_client().xadd(spool_key(), {"r": encode_record(record)})
        drain_once(sync_client())
        return budget(world, "month", tokens=10_000)

    of = await in_db_thread(prepare)
    await enter(caller(world), 1, 1)
    assert (await state(of)).tokens == 1110


async def test_fault_35_a_clock_that_goes_back_over_a_reset_neither_resets_nor_owes(
    world: World,
) -> None:
    of = await in_db_thread(budget, world, tokens=100)
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    who = caller(world)
    for at, prompt in ((midnight - 600, 60), (midnight + 600, 30), (midnight - 300, 30)):
        got = await enter(who, prompt, 10, f"{at}", started_at=at)
        await settle(used(world, f"{at}", got, prompt, 0, started_at=at), got)
    with pytest.raises(BudgetSpent):
        await enter(who, 11, 0, started_at=midnight - 100)
    assert (await enter(who, 60, 20, started_at=midnight + 700)).output_tokens == 10
    assert (await state(of)).tokens == 30


async def test_a_price_holds_from_its_moment_on(world: World) -> None:
    now = datetime.now(UTC)

    def prepare() -> None:
        price()
        price(valid_from=now + timedelta(hours=1), input_per_million="7")

    await in_db_thread(prepare)
    assert (await enter(caller(world))).rates.input == 1_000_000
    later = await enter(caller(world), started_at=time.time() + 3700)
    assert later.rates.input == 7_000_000
    assert (await enter(caller(world), model="other")).rates == (0, 0, 0)
    tone = AdapterUse("tone", "d" * 64, ("m:tone",))
    adapter = await enter(caller(world), model="m", adapter=tone)
    assert adapter.rates.output == 2_000_000


async def test_no_more_run_at_a_time_than_allowed(world: World) -> None:
    who = caller(world, max_running_requests=3, key_max_running_requests=2)
    got = [await enter(who, request_id=f"r{n}") for n in range(2)]
    with pytest.raises(RateLimited, match=r"This key has 2 requests running"):
        await enter(who)
    other = caller(world, max_running_requests=3, key_id=world.rival_key.pk)
    await enter(other)
    with pytest.raises(RateLimited, match=r"This tenant has 3 requests running"):
        await enter(other)
    await settle(used(world, "r0", got[0], 10, 1), got[0])
    await enter(who)


async def test_what_a_killed_gateway_held_is_settled_by_another(world: World) -> None:
    await in_db_thread(price)
    of = await in_db_thread(budget, world, tokens=1000, amount="1")
    who = caller(world, max_running_requests=1)
    await enter(who, 10, 500, "r", outbox="gone", stream=True)
    client = sync_client()
    # As if another process had let it in, which is silent for long.
    client.rename(open_key(GATEWAY), open_key("dead"))
    client.zadd(gateways_key(), {"dead": time.time() - 60})
    client.hset(key("progress:gone"), "r/0", 7)
    await in_db_thread(beat, client)
    now = await state(of)
    assert (now.tokens, now.held_tokens) == (17, 0)
    assert (now.nanos, now.held_nanos) == (24_000, 0)
    await enter(who)
    await in_db_thread(drain_once, client)
    row = await in_db_thread(UsageEntry.objects.get)
    assert (row.request_id, row.prompt_tokens, row.completion_tokens) == ("r", 10, 7)
    assert (row.status, row.finish_reason, row.stream) == (499, "abort", True)
    assert await in_db_thread(bury, client, "dead") == 0


async def test_a_request_that_had_not_begun_when_its_gateway_died_costs_nothing(
    world: World,
) -> None:
    of = await in_db_thread(budget, world, tokens=1000)
    await enter(caller(world), 10, 500, "r", outbox="gone")
    await in_db_thread(bury, sync_client(), GATEWAY)
    now = await state(of)
    assert (now.tokens, now.held_tokens) == (0, 0)


async def test_fault_28_what_was_settled_while_redis_was_away_is_given_back_when_it_returns(
    world: World, settings: Any
) -> None:
    of = await in_db_thread(budget, world, tokens=1000)
    got = await enter(caller(world), 10, 100, "r")
    url = settings.REDIS_URL
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    await settle(used(world, "r", got, 10, 20), got)
    settings.REDIS_URL = url
    assert await in_db_thread(UsageEntry.objects.count) == 1
    await in_db_thread(beat, sync_client())
    now = await state(of)
    assert (now.tokens, now.held_tokens) == (30, 0)
    await in_db_thread(drain_once, sync_client())
    assert await in_db_thread(UsageEntry.objects.count) == 1


async def test_without_redis_the_ledger_tells_how_a_budget_stands(
    world: World, settings: Any
) -> None:
    of = await in_db_thread(budget, world, tokens=1000)
    got = await enter(caller(world), 10, 100, "r")
    await settle(used(world, "r", got, 10, 20), got)
    await in_db_thread(drain_once, sync_client())
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


# -- who may set them -----------------------------------------------------------------------------


@database
@pytest.mark.parametrize(
    ("who", "of_tenant", "of_key"),
    [
        ("operator", None, None),
        ("owner", PermissionDenied, None),
        ("admin", PermissionDenied, None),
        ("member", PermissionDenied, PermissionDenied),
        ("viewer", PermissionDenied, PermissionDenied),
        ("outsider", NotFound, NotFound),
    ],
)
def test_operators_set_a_tenants_budgets_and_its_admins_those_of_keys(
    world: World, who: str, of_tenant: Any, of_key: Any
) -> None:
    for of, refused in ((None, of_tenant), (world.key, of_key)):
        wanted = {"tenant": world.acme, "period": "day", "key": of, "tokens": 5}
        if refused is None:
            made = actions.set_budget(actor=world.user(who), **wanted)
            actions.delete_budget(actor=world.user(who), budget=made)
        else:
            with pytest.raises(refused):
                actions.set_budget(actor=world.user(who), **wanted)
    expected = {"operator": 4, "owner": 2, "admin": 2}.get(who, 0)
    assert AuditEntry.objects.filter(action__startswith="budget.").count() == expected


@database
@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({}, "tokens"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": 2**60}, "tokens"),
        ({"amount": "a lot"}, "amount"),
        ({"amount": "-1"}, "amount"),
        ({"amount": "NaN"}, "amount"),
        ({"amount": "1e300"}, "amount"),
        ({"amount": "0.0000000001"}, "amount"),
        ({"tokens": 1, "period": "year"}, "period"),
        ({"tokens": 1, "alert_percent": 101}, "alert_percent"),
    ],
)
def test_bad_budgets_are_refused_by_name(world: World, values: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        budget(world, **{"period": "day", **values})
    assert caught.value.param == param
    assert not Budget.objects.exists()


@database
def test_a_budget_is_changed_in_place_and_another_tenants_key_is_unknown(world: World) -> None:
    first = budget(world, tokens=5)
    assert budget(world, amount="1.5") == first
    first.refresh_from_db()
    assert (first.tokens, str(first.amount)) == (None, "1.500000000")
    entry = AuditEntry.objects.filter(action="budget.update").get()
    assert entry.details["changes"] == {"tokens": [5, None], "amount": [None, "1.5"]}
    with pytest.raises(NotFound):
        budget(world, key=world.rival_key, tokens=5)


@database
def test_prices_are_the_operators_and_never_change_the_past(world: World) -> None:
    with pytest.raises(PermissionDenied):
        actions.set_price(
            actor=world.owner, model="m", input_per_million="1", output_per_million="1"
        )
    with pytest.raises(InvalidRequest, match="past"):
        price(valid_from=datetime.now(UTC) - timedelta(hours=1))
    for bad in ("x", "-1", "inf", "1e9", "0.0000001"):
        with pytest.raises(InvalidRequest):
            price(input_per_million=bad)
    price()
    entry = AuditEntry.objects.filter(action="price.set").get()
    assert entry.details["output_per_million"] == "2"


# -- soft limits ----------------------------------------------------------------------------------


def spend(world: World, of: Budget, tokens: int) -> None:
    """Settle so many tokens."""
    record = used(world, uuid.uuid4().hex, admission.UNLIMITED, tokens, 0)
    sync_client().xadd(spool_key(), {"r": encode_record(record)})
    drain_once(sync_client())
    sync_client().delete(*sync_client().keys(key("budget:*")) or ["none"])


def test_a_tenant_is_told_once_a_period_by_mail_and_signed_webhook(
    world: World, settings: Any, mailoutbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SMTP_URL = "smtp://mail.example.org"
    sent: list[tuple[str, bytes, dict[str, str]]] = []
    answers = [500, 204]

    def receive(url: str, body: bytes, headers: dict[str, str]) -> int:
        sent.append((url, body, headers))
        return answers.pop(0)

    monkeypatch.setattr(alerts, "post", receive)
    hook = actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    of = budget(world, tokens=100)
    spend(world, of, 79)
    assert alerts.send_alerts() == 0
    spend(world, of, 1)
    assert alerts.send_alerts() == 1
    assert sorted(mail.to[0] for mail in mailoutbox) == ["admin@example.org", "owner@example.org"]
    assert "80 % of a budget of acme" in mailoutbox[0].subject
    assert alerts.send_alerts() == 1  # the webhook had answered 500
    assert alerts.send_alerts() == 0
    assert (len(mailoutbox), len(sent)) == (2, 2)
    url, body, headers = sent[-1]
    told = json.loads(body)
    assert (url, told["type"], told["percent"]) == ("https://x.example/in", "budget.alert", 80)
    seconds = int(headers["X-Quire-Signature"].split(",")[0].removeprefix("t="))
    assert headers["X-Quire-Signature"] == alerts.signature(hook.secret, body, seconds)
    # The next period is told of anew.
    Budget.objects.update(alerted_for=of.created_at - timedelta(days=2))
    assert alerts.send_alerts() == 1
    assert len(mailoutbox) == 4


def test_fault_62_a_webhook_into_the_private_network_is_never_called(
    world: World, settings: Any
) -> None:
    import http.server
    import threading

    asked: list[str] = []

    class Inside(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Inside)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/in"
        actions.set_webhook(actor=world.owner, tenant=world.acme, url=url)
        spend(world, budget(world, tokens=100), 100)
        assert alerts.send_alerts() == 0
        assert asked == []
        settings.QUIRE = {**settings.QUIRE, "EGRESS_NETWORKS": ("127.0.0.0/8",)}
        assert alerts.send_alerts() == 1
        assert asked == ["/in"]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("who", "refused"), [("member", PermissionDenied), ("outsider", NotFound)])
def test_admins_set_webhooks(world: World, who: str, refused: Any) -> None:
    url = "https://x.example/in"
    with pytest.raises(refused):
        actions.set_webhook(actor=world.user(who), tenant=world.acme, url=url)
    with pytest.raises(InvalidRequest):
        actions.set_webhook(actor=world.admin, tenant=world.acme, url="file:///etc/passwd")
    actions.set_webhook(actor=world.admin, tenant=world.acme, url=url)
    with pytest.raises(refused):
        actions.delete_webhook(actor=world.user(who), tenant=world.acme)
    actions.delete_webhook(actor=world.admin, tenant=world.acme)
    entries = AuditEntry.objects.filter(action__startswith="webhook.")
    assert entries.count() == 2
