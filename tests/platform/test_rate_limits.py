"""Token buckets in Redis: what gets in, what is told to wait and for how long."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from typing import Any

import pytest

from common.errors import ServiceUnavailable
from engine.system.redis_client import RedisPipeline
from metering import rules
from metering.access import AdmissionRequest, RateLimited, UsageRecord, admit, settle
from metering.admission import UNLIMITED, Admission
from metering.open_requests import GATEWAY, open_key, reservation_key
from metering.redis_scripts import close_redis_link, redis_key, redis_link, sync_client
from tenants.authentication import Caller
from tests.platform.callers import CALLER

pytestmark = pytest.mark.usefixtures("redis_server")


@pytest.fixture(autouse=True)
def _no_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants 1 and 9 have neither budgets nor prices: the database isn't asked."""
    monkeypatch.setattr(rules._rules, "ttl", 3600.0)
    for tenant_id in (1, 9):
        rules._rules.store(tenant_id, rules.PricingRules("UTC", [], {}, {}))


def caller(**limits: int | None) -> Caller:
    """A caller with limits."""
    return replace(CALLER, **limits)  # type: ignore[arg-type]


async def enter(
    who: Caller,
    prompt: int = 10,
    output: int = 10,
    request_id: str = "",
    *,
    is_continuation: bool = False,
) -> Admission:
    asking = AdmissionRequest(
        request_id=request_id or uuid.uuid4().hex,
        endpoint="chat",
        model="m",
        prompt_tokens=prompt,
        max_output_tokens=output,
        is_continuation=is_continuation,
    )
    return await admit(who, asking)


def record(request_id: str, prompt: int, output: int) -> UsageRecord:
    return UsageRecord(
        request_id=request_id,
        tenant_id=1,
        endpoint="chat",
        model="m",
        prompt_tokens=prompt,
        completion_tokens=output,
        status=200,
        started_at=time.time(),
        duration_ms=1.0,
    )


async def level(kind: str, owner: str = "tenant:1") -> float:
    level: Any = sync_client().hget(redis_key(f"limit:{kind}:{owner}"), "level")
    return float(level)


async def set_back(kind: str, seconds: float, owner: str = "tenant:1") -> None:
    """Make a bucket believe that it was last touched so many seconds earlier."""
    name = redis_key(f"limit:{kind}:{owner}")
    filled_at: Any = sync_client().hget(name, "at")
    sync_client().hset(name, "at", str(float(filled_at) - seconds))


async def test_without_limits_redis_is_not_even_asked(settings) -> None:
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    assert await enter(caller()) == replace(UNLIMITED, reserved=True)
    none = caller(requests_per_minute=0, tokens_per_minute=0)
    assert await enter(none) == replace(UNLIMITED, reserved=True)


async def test_what_another_gateway_would_bill_is_written_before_the_engine_can_hear_of_it() -> (
    None
):
    await redis_link().execute("PING")  # it's connected
    await enter(caller(), request_id="r1")
    wire = redis_link()._wire
    assert wire is not None
    assert len(wire.pending) == 1  # written, not answered yet
    assert await redis_link().execute("HEXISTS", open_key(GATEWAY), "r1") == 1


async def test_fault_24_of_200_concurrent_requests_no_more_get_in_than_the_limit() -> None:
    who = caller(requests_per_minute=50)
    results = await asyncio.gather(*[enter(who) for _ in range(200)], return_exceptions=True)
    admitted = [result for result in results if isinstance(result, Admission)]
    refused = [result for result in results if isinstance(result, RateLimited)]
    assert len(admitted) + len(refused) == 200
    # The bucket refills by 50/60 a second while the test runs.
    assert 50 <= len(admitted) <= 60
    assert min(a.remaining_requests or 0 for a in admitted) == 0


async def test_fault_24_tokens_reserved_concurrently_never_exceed_the_limit() -> None:
    who = caller(tokens_per_minute=1000)
    results = await asyncio.gather(
        *[enter(who, prompt=60, output=40) for _ in range(200)], return_exceptions=True
    )
    admitted = sum(isinstance(result, Admission) for result in results)
    assert 10 <= admitted <= 12
    assert await level("tokens") >= 0


async def test_headers_tell_what_is_left_and_when_it_is_full_again() -> None:
    got = await enter(caller(requests_per_minute=60, tokens_per_minute=600), prompt=100, output=50)
    assert (got.limit_requests, got.remaining_requests) == (60, 59)
    assert (got.limit_tokens, got.remaining_tokens) == (600, 450)
    assert got.reset_requests_s == pytest.approx(1.0)
    assert got.reset_tokens_s == pytest.approx(15.0)


async def test_a_refusal_says_exactly_how_long_to_wait() -> None:
    who = caller(requests_per_minute=2)
    for _ in range(2):
        await enter(who)
    with pytest.raises(RateLimited) as caught:
        await enter(who)
    error = caught.value
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert 29 < error.retry_after <= 30
    await set_back("requests", error.retry_after - 0.5)
    with pytest.raises(RateLimited):
        await enter(who)
    await set_back("requests", 0.6)
    await enter(who)


async def test_a_refused_request_takes_nothing_from_any_limit() -> None:
    who = caller(requests_per_minute=1, tokens_per_minute=1000)
    await enter(who)
    initial_level = await level("tokens")
    with pytest.raises(RateLimited):
        await enter(who)
    assert await level("tokens") == pytest.approx(initial_level, abs=5)


async def test_a_keys_own_limit_holds_within_its_tenants() -> None:
    narrow = caller(requests_per_minute=100, key_requests_per_minute=1)
    got = await enter(narrow)
    assert (got.limit_requests, got.remaining_requests) == (1, 0)
    with pytest.raises(RateLimited, match="this key"):
        await enter(narrow)
    await enter(caller(requests_per_minute=100))


async def test_two_tenants_do_not_share_a_bucket() -> None:
    await enter(caller(requests_per_minute=1))
    other = Caller(**{**caller(requests_per_minute=1).__dict__, "tenant_id": 9})
    await enter(other)


async def test_the_installations_default_holds_for_tenants_without_limits(settings) -> None:
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"requests_per_minute": 1})
    await enter(caller())
    with pytest.raises(RateLimited):
        await enter(caller())
    await enter(caller(requests_per_minute=5))


async def test_a_limit_that_was_changed_holds_at_once_and_forgets_no_use() -> None:
    for _ in range(8):
        await enter(caller(requests_per_minute=10))
    assert (await enter(caller(requests_per_minute=20))).remaining_requests == 11
    with pytest.raises(RateLimited):
        await enter(caller(requests_per_minute=5))


async def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(RateLimited, match=r"2000 tokens.*1000 tokens a minute"):
        await enter(caller(tokens_per_minute=1000), prompt=2000)


async def test_a_long_output_reserves_no_more_than_the_limit() -> None:
    got = await enter(caller(tokens_per_minute=1000), prompt=10, output=10**9)
    assert got.remaining_tokens == 0


async def test_settling_gives_back_what_was_not_used() -> None:
    await enter(caller(tokens_per_minute=1000), prompt=100, output=800, request_id="r")
    assert await level("tokens") == pytest.approx(100)
    await settle(record("r", 100, 50))
    assert await level("tokens") == pytest.approx(850, abs=20)
    assert not sync_client().exists(reservation_key("r"))


async def test_settling_twice_gives_back_once() -> None:
    await enter(caller(tokens_per_minute=1000), prompt=100, output=800, request_id="r")
    await settle(record("r", 100, 50))
    initial_level = await level("tokens")
    await settle(record("r", 100, 50))
    assert await level("tokens") == pytest.approx(initial_level, abs=20)


async def test_more_used_than_reserved_is_a_debt() -> None:
    who = caller(tokens_per_minute=1000)
    await enter(who, prompt=500, output=10**6, request_id="r")
    await settle(record("r", 500, 1500))
    assert await level("tokens") == pytest.approx(-1000, abs=20)
    with pytest.raises(RateLimited) as caught:
        await enter(who, prompt=10, output=0)
    assert 55 < caught.value.retry_after < 61


async def test_fault_35_a_clock_set_back_neither_refills_nor_stops_refilling() -> None:
    who = caller(requests_per_minute=60)
    for _ in range(60):
        await enter(who)
    await set_back("requests", -3600)  # the bucket was last touched an hour in the future
    with pytest.raises(RateLimited) as caught:
        await enter(who)
    assert caught.value.retry_after <= 1.01
    await set_back("requests", 3601)
    # Back in time: at most one bucket's worth, whatever the clock did meanwhile.
    await set_back("requests", 7200)
    results = await asyncio.gather(*[enter(who) for _ in range(100)], return_exceptions=True)
    assert 60 <= sum(isinstance(result, Admission) for result in results) <= 65


async def test_fault_35_a_refused_call_under_a_clock_set_back_lets_the_next_second_count() -> None:
    who = caller(requests_per_minute=60)
    await enter(who)
    await set_back("requests", -3600)
    await enter(who)  # writes the present time
    await set_back("requests", 1)
    assert (await enter(who)).remaining_requests == 58


async def test_fault_28_scripts_survive_a_restart_of_redis() -> None:
    who = caller(requests_per_minute=10)
    await enter(who)
    sync_client().script_flush()
    assert (await enter(who)).remaining_requests == 8


async def test_without_redis_a_limited_caller_gets_503(settings) -> None:
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=0.5)
    with pytest.raises(ServiceUnavailable) as caught:
        await enter(caller(requests_per_minute=1))
    assert caught.value.status == 503


async def test_a_request_waits_for_a_redis_that_comes_back(settings) -> None:
    redis_url = settings.REDIS_URL
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    entering = asyncio.create_task(enter(caller(requests_per_minute=9)))
    await asyncio.sleep(0)
    while not entering.done():
        await close_redis_link()
        settings.REDIS_URL = redis_url
        await asyncio.sleep(0.05)
    assert (await entering).remaining_requests == 8


async def test_a_request_that_asks_twice_takes_once() -> None:
    who = caller(tokens_per_minute=1000)
    first = await enter(who, request_id="twice")
    again = await enter(who, request_id="twice")
    assert again.remaining_tokens == first.remaining_tokens
    assert again.output_tokens == first.output_tokens


async def test_buckets_and_reservations_leave_redis_by_themselves() -> None:
    await enter(caller(requests_per_minute=10, tokens_per_minute=1000), request_id="r")
    for name in sync_client().scan_iter(match=redis_key("*")):
        if name.decode() == open_key(GATEWAY):  # settling removes it, or another gateway does
            continue
        assert 0 < sync_client().ttl(name) <= 3600, name
    await close_redis_link()


def test_each_loop_has_a_link_of_its_own() -> None:
    async def link() -> RedisPipeline:
        first = redis_link()
        assert redis_link() is first
        await close_redis_link()
        return first

    assert asyncio.run(link()) is not asyncio.run(link())


async def test_what_goes_on_with_a_request_takes_tokens_alone() -> None:
    who = caller(requests_per_minute=1, max_running_requests=1, tokens_per_minute=100)
    await enter(who)
    await enter(who, is_continuation=True)
    # The buckets are refilled by 100 and by 1 a minute while the test runs.
    assert 60 <= await level("tokens") < 80
    assert await level("requests") == pytest.approx(0, abs=0.5)
    with pytest.raises(RateLimited):
        await enter(who, prompt=90, is_continuation=True)
