"""Streams survive the engine: what one replica leaves, another goes on with. Nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import ErrorInfo, OutboxBatch, TokenDelta
from engine.contract.replica_state import KVHandover, Numerics
from engine.text.chat_template import render_chat
from engine.text.tokenizer import Tokenizer
from inference.engine_client import failover
from inference.engine_client.client import get_engine_client
from inference.schemas.chat import ChatRequest
from tests.fakes.fake_replica import FakeReplica
from tests.inference.asgi_client import chat_body, parse_events
from tests.inference.conftest import Gateway, generated_tokens, until
from tests.inference.failing_over import (
    COUNT,
    expected_text,
    expire,
    read,
    start,
    tell_of_death,
    text_of,
    until_dead,
)
from tests.services import running_redis


@pytest.mark.parametrize("die_after", [0, 1, 17, COUNT - 1])
async def test_fault_27_a_killed_replicas_streams_go_on_elsewhere(
    gateway: Gateway, tokenizer: Tokenizer, die_after: int
) -> None:
    first, second = gateway.fake(die_after=die_after), gateway.fake()
    async with first, contextlib.AsyncExitStack() as stack:
        await gateway.refresh()
        exchange = start(gateway)
        await until_dead(first)
        await stack.enter_async_context(second)
        await expire(gateway, first)
        events = await read(exchange)
    assert text_of(events) == expected_text(tokenizer)
    assert events[-1] == "[DONE]"
    (resumed,) = second.received
    sent = [len(tokens) for tokens in resumed.resume_token_ids]
    assert sent == ([die_after] if die_after else [])
    (usage,) = await gateway.usage()
    assert (usage.completion_tokens, usage.status) == (COUNT, 200)


async def test_a_restarted_replica_goes_on_with_its_own_streams(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    first = gateway.fake(die_after=20, replica_id="only")
    again = gateway.fake(replica_id="only")
    async with first:
        await gateway.refresh()
        exchange = start(gateway, n=2)
        await until_dead(first)
        async with again:
            events = await read(exchange)
    assert [text_of(events, i) for i in range(2)] == [expected_text(tokenizer, i) for i in range(2)]


async def test_a_line_of_another_task_about_a_request_names_it_its_tenant_and_its_model(
    gateway: Gateway,
    written: Callable[[], list[dict[str, Any]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "inference.engine_client.client")
    first = gateway.fake(die_after=20, replica_id="only")
    async with first:
        await gateway.refresh()
        exchange = start(gateway)
        await until_dead(first)
        async with gateway.fake(replica_id="only"):
            await read(exchange)
    (moved,) = [entry for entry in written() if "moves on" in entry["message"]]
    assert moved["request_id"].startswith("req-")
    assert (moved["tenant"], moved["model"]) == (gateway.rows.tenant.slug, "fake")


async def test_outputs_that_had_finished_are_not_made_again(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    prompt = render_chat(tokenizer, [{"role": "user", "content": "hello"}])
    first_tokens, second_tokens = (
        generated_tokens(prompt, COUNT),
        generated_tokens(prompt, COUNT, 1),
    )
    stop_at = next(token for token in first_tokens[:10] if token not in second_tokens[:25])
    cut = second_tokens.index(stop_at) + 1 if stop_at in second_tokens else COUNT
    first, second = gateway.fake(die_after=20), gateway.fake()
    async with first:
        await gateway.refresh()
        exchange = start(gateway, n=2, stop_token_ids=[stop_at])
        await until_dead(first)
        async with second:
            await expire(gateway, first)
            events = await read(exchange)
    (resumed,) = second.received
    assert resumed.skip_indices == [0]
    assert len(resumed.resume_token_ids[0]) == first_tokens.index(stop_at) + 1
    assert text_of(events, 1) == tokenizer.decode(second_tokens[:cut])


async def test_a_request_waits_for_a_replica_that_is_being_restarted(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(gateway.fake()):
        pass
    await gateway.refresh()
    exchange = start(gateway)
    await asyncio.sleep(0.3)
    async with gateway.fake():
        assert text_of(await read(exchange)) == expected_text(tokenizer)


async def test_without_a_replica_the_wait_ends_with_a_typed_error(
    gateway: Gateway, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=0.3)
    async with gateway.serving(gateway.fake()):
        pass
    await gateway.refresh()
    reply = await gateway.client.chat()
    assert reply.status == 503
    assert reply.error["code"] == "engine_unavailable"
    assert int(reply.headers["retry-after"]) >= 1
    (usage,) = await gateway.usage()
    assert (usage.status, usage.prompt_tokens, usage.completion_tokens) == (503, 0, 0)


async def test_who_waited_for_a_model_that_loads_again_is_told_so(
    gateway: Gateway, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=0.3)
    async with gateway.serving(gateway.fake()):
        pass
    async with gateway.serving(gateway.fake(load_seconds=60)):
        reply = await gateway.client.chat()
    assert reply.status == 503
    assert reply.error["message"].startswith("The model 'fake' is loading (")
    assert reply.error["message"].endswith("Try again soon. Waited 0.3 s.")


async def test_a_model_that_no_replica_ever_served_is_refused_at_once(
    gateway: Gateway, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=600)
    reply = await asyncio.wait_for(gateway.client.chat(), 60)
    assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")


async def test_an_error_after_the_first_byte_is_the_streams_last_event(
    gateway: Gateway, tokenizer: Tokenizer, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=0.3)
    replica = gateway.fake(die_after=9)
    async with replica:
        await gateway.refresh()
        exchange = start(gateway)
        await until_dead(replica)
        await expire(gateway, replica)
        status, _ = await exchange.head()
        body = b"".join([chunk async for chunk in exchange.chunks()])
    assert status == 200
    events = parse_events(body)
    assert text_of(events) == expected_text(tokenizer, count=9)
    assert events[-1]["error"]["code"] == "engine_unavailable"
    assert b"event: error\n" in body
    assert b"[DONE]" not in body
    (usage,) = await gateway.usage()
    assert (usage.status, usage.completion_tokens, usage.finish_reason) == (503, 9, "error")
    assert usage.prompt_tokens > 0


async def test_a_stream_that_has_begun_waits_longer_while_a_replica_loads(
    gateway: Gateway, tokenizer: Tokenizer, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=0.3)
    monkeypatch.setattr(failover, "LOADING_IS_WORTH", 1000)
    first = gateway.fake(die_after=9)
    async with first:
        await gateway.refresh()
        exchange = start(gateway)
        await until_dead(first)
        async with gateway.fake(load_seconds=1.0):
            await expire(gateway, first)
            assert text_of(await read(exchange)) == expected_text(tokenizer)


async def test_a_draining_replica_finishes_what_it_has(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    first = gateway.fake(token_delay=0.01, replica_id="a")
    async with gateway.serving(first):
        exchange = start(gateway)
        await until(lambda: first.running)
        first.drain()
        await first._beat()
        async with gateway.fake(replica_id="b") as second:
            await gateway.refresh()
            later = start(gateway)
            assert text_of(await read(exchange)) == expected_text(tokenizer)
            assert text_of(await read(later)) == expected_text(tokenizer)
            assert len(second.received) == 1


async def test_what_a_draining_replica_had_not_read_goes_elsewhere(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    first = gateway.fake(replica_id="a")

    async def deaf(entry_id: bytes, request: Any) -> None:
        first.received.append(request)

    first._start = deaf  # type: ignore[method-assign]
    async with gateway.serving(first):
        exchange = start(gateway)
        await until(lambda: first.received)
        first.state = "draining"
        await first._beat()
        async with gateway.fake(replica_id="b"):
            await gateway.refresh()
            (flight,) = get_engine_client().flights
            assert flight.replica_id == "a", "it gets a moment"
            flight.last_heard_at -= 5
            await gateway.refresh()
            assert text_of(await read(exchange)) == expected_text(tokenizer)


async def test_a_replica_that_refuses_sends_the_request_on(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    first = gateway.fake(replica_id="a")

    async def refuse(entry_id: bytes, request: Any) -> None:
        first.received.append(request)
        info = ErrorInfo(message="draining", status=503, code="engine_unavailable")
        delta = TokenDelta(request_id=request.request_id, finish_reason="error", error=info)
        await first._write(request.gateway_id, [delta])
        first.state = "draining"
        await first._beat()

    first._start = refuse  # type: ignore[method-assign]
    async with gateway.serving(first):
        exchange = start(gateway)
        await until(lambda: first.received)
        async with gateway.fake(replica_id="b"):
            assert text_of(await read(exchange)) == expected_text(tokenizer)


async def test_an_engines_own_error_is_raised_as_it_is(gateway: Gateway) -> None:
    replica = gateway.fake()

    async def refuse(entry_id: bytes, request: Any) -> None:
        info = ErrorInfo(
            message="Too many wait.", status=429, error_type="rate_limit_error", code="full"
        )
        delta = TokenDelta(request_id=request.request_id, finish_reason="error", error=info)
        await replica._write(request.gateway_id, [delta])

    replica._start = refuse  # type: ignore[method-assign]
    async with gateway.serving(replica):
        for stream in (False, True):
            reply = await gateway.client.chat(stream=stream)
            assert reply.status == 429
            assert reply.error == {
                "message": "Too many wait.",
                "type": "rate_limit_error",
                "param": None,
                "code": "full",
            }
            assert "retry-after" in reply.headers


# -- Redis ------------------------------------------------------------------------------------


async def test_fault_28_an_entry_that_comes_twice_changes_nothing(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.fake()
    original = replica._write

    async def twice(*args: Any, **options: Any) -> None:
        await original(*args, **options)
        await original(*args, **options)

    replica._write = twice  # type: ignore[method-assign]
    async with gateway.serving(replica):
        events = await read(start(gateway))
    assert text_of(events) == expected_text(tokenizer)
    (usage,) = await gateway.usage()
    assert usage.completion_tokens == COUNT


async def test_fault_28_a_lost_entry_is_made_good(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.fake(token_delay=0.005)
    original, writes = replica._write, 0

    async def forgetful(*args: Any, **options: Any) -> None:
        nonlocal writes
        writes += 1
        if writes != 7:
            await original(*args, **options)

    replica._write = forgetful  # type: ignore[method-assign]
    async with gateway.serving(replica):
        events = await read(start(gateway))
    assert text_of(events) == expected_text(tokenizer)
    first, second = replica.received
    assert second.request_id == f"{first.request_id}~2"
    assert len(second.resume_token_ids[0]) == 6
    assert replica.aborted == [first.request_id]


async def test_fault_28_entries_that_are_no_messages_do_no_harm(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    client = get_engine_client()
    await client.start()
    key = redis_keys.outbox_key(client.gateway_id, gateway.prefix)
    for data in (b"", b"\xc1", b"{}", protocol.encode(_foreign_batch())):
        await gateway.redis.xadd(key, {protocol.STREAM_FIELD: data})
    await gateway.redis.xadd(key, {b"x": b"y"})
    async with gateway.serving(gateway.fake()):
        assert text_of(await read(start(gateway))) == expected_text(tokenizer)


def _foreign_batch() -> OutboxBatch:
    deltas = [
        TokenDelta(request_id="nobody's", token_ids=[1], start=99),
        TokenDelta(request_id="", index=-5, finish_reason="error"),
    ]
    return OutboxBatch(replica_id="x", incarnation="y", step=1, deltas=deltas)


async def test_fault_28_the_outbox_is_trimmed_and_expires(gateway: Gateway) -> None:
    client = get_engine_client()
    async with gateway.serving(gateway.fake()):
        for _ in range(4):
            await read(start(gateway))
        key = redis_keys.outbox_key(client.gateway_id, gateway.prefix)
        assert 0 < await gateway.redis.ttl(key) <= 60
        async with asyncio.timeout(60):
            while await gateway.redis.xlen(key):  # noqa: ASYNC110 - Redis tells nobody
                await asyncio.sleep(0.01)
    await client.close()
    assert not await gateway.redis.exists(key)


async def test_fault_28_when_redis_forgets_everything_streams_go_on(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    """What a restart without persistence does, on a server that other tests share."""
    replica = gateway.fake(token_delay=0.01, replica_id="only")
    async with gateway.serving(replica):
        exchange = start(gateway)
        await until(lambda: replica.steps >= 10)
        replica.running.clear()
        client = get_engine_client()
        await gateway.redis.delete(
            redis_keys.outbox_key(client.gateway_id, gateway.prefix),
        )
        client.watchman._redis_run = "the one before"
        client.watchman.mark_redis_suspect()
        assert text_of(await read(exchange)) == expected_text(tokenizer)


async def test_a_request_that_a_replica_never_got_is_sent_again(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.fake()
    original, dropped = replica._start, 0

    async def deaf_once(entry_id: bytes, request: Any) -> None:
        nonlocal dropped
        dropped += 1
        if dropped > 1:
            await original(entry_id, request)

    replica._start = deaf_once  # type: ignore[method-assign]
    async with gateway.serving(replica):
        exchange = start(gateway)
        await until(lambda: dropped)
        (flight,) = get_engine_client().flights
        flight.last_heard_at -= 60
        await gateway.refresh()
        assert text_of(await read(exchange)) == expected_text(tokenizer)


async def test_what_an_earlier_attempt_still_sends_is_ignored(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    slow, fast = gateway.fake(token_delay=0.02, replica_id="slow"), gateway.fake(replica_id="fast")
    async with gateway.serving(slow):
        exchange = start(gateway)
        await until(lambda: slow.steps >= 5)
        slow._abort = lambda message: None  # type: ignore[method-assign]
        client = get_engine_client()
        async with fast:
            await gateway.refresh()
            (flight,) = client.flights
            client.fleet.forget("slow")
            client.unassign(flight, "the test says so")
            assert text_of(await read(exchange)) == expected_text(tokenizer)
            # The first one goes on for a while, to nobody.
            await asyncio.sleep(0.1)
            assert slow.running


async def test_a_request_that_no_message_can_hold_ends_and_holds_up_nobody(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway.serving(gateway.fake(eos_after=5)):
        with monkeypatch.context() as patch:
            patch.setattr(ChatRequest, "resolve_service_tier", lambda *_: (2**70, None))
            reply = await gateway.client.chat()
        assert (reply.status, reply.error["code"]) == (500, "engine_fault")
        assert list(get_engine_client().flights) == []
        (usage,) = await gateway.usage()
        assert (usage.completion_tokens, usage.status) == (0, 500), "it is settled"
        await gateway.refresh()
        assert (await gateway.client.chat()).status == 200


async def test_without_a_seed_every_attempt_gets_the_same_one(gateway: Gateway) -> None:
    first, second = gateway.fake(die_after=5), gateway.fake()
    async with first:
        await gateway.refresh()
        exchange = start(gateway)
        await until_dead(first)
        async with second:
            await expire(gateway, first)
            await read(exchange)
    seeds = [request.sampling.seed for request in (first.received[0], second.received[0])]
    assert seeds[0] is not None
    assert seeds[0] == seeds[1]


async def test_two_gateways_do_not_get_each_others_tokens(
    gateway: Gateway, tokenizer: Tokenizer, redis_url: str
) -> None:
    from inference.engine_client.client import EngineClient

    other = EngineClient(redis_url)
    async with gateway.serving(gateway.fake(token_delay=0.005)):
        await other.start()
        exchange = start(gateway)
        assert text_of(await read(exchange)) == expected_text(tokenizer)
        assert other.gateway_id != get_engine_client().gateway_id
    await other.close()


async def test_fault_28_redis_is_restarted_in_the_middle_of_a_stream(
    gateway: Gateway, tokenizer: Tokenizer, short_tmp: Path, settings: Any
) -> None:
    """A server of its own, without persistence: it comes back knowing nothing."""
    with running_redis(short_tmp / "restarted") as url:
        settings.REDIS_URL = gateway.redis_url = url
        first = gateway.fake(token_delay=0.02, replica_id="only")
        async with first:
            await gateway.refresh()
            exchange = start(gateway)
            await until(lambda: first.steps >= 5)
            first.state = "dead"  # its engine starts anew later
    with running_redis(short_tmp / "restarted"):
        await asyncio.sleep(0.2)
        async with gateway.fake(replica_id="only") as again:
            assert text_of(await read(exchange)) == expected_text(tokenizer)
    assert again.received
    assert 0 < len(again.received[-1].resume_token_ids[0]) < COUNT


async def test_news_of_a_death_move_its_streams_though_its_heartbeat_is_still_there(
    gateway: Gateway, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = gateway.fake(die_after=10), gateway.fake()
    async with first:
        await gateway.refresh()
        exchange = start(gateway)
        await until_dead(first)
        async with second:
            await gateway.refresh()
            await tell_of_death(gateway, first)
            events = await read(exchange)
            fleet = get_engine_client().fleet
            await gateway.refresh()
            # Its last heartbeat is read again and again until it expires, and means nothing.
            assert [r.heartbeat.replica_id for r in fleet] == [second.replica_id]
    assert text_of(events) == expected_text(tokenizer)
    assert len(second.received) == 1


async def test_fault_54_the_look_at_thousands_of_requests_lets_others_in_between(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.loop.fair_dispatch.SLICE_S", 0.0)
    async with gateway.fake(token_delay=600):
        await gateway.refresh()
        body = {"model": "fake", "max_tokens": 1, "prompt": ["hello"] * 300}
        exchange = gateway.client.open("POST", "/v1/completions", body)
        client = get_engine_client()
        await until(lambda: len(client.flights) == 300)
        fleet_check = asyncio.create_task(client.watchman.check())
        turns = 0
        while not fleet_check.done():
            await asyncio.sleep(0)
            turns += 1
            if turns == 100:  # its client leaves while it's looked at
                await exchange.leave()
        assert turns >= 100
        assert not client.flights


async def test_fault_48_a_silent_replicas_streams_go_to_another_one(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    first, second = gateway.fake(die_after=10), gateway.fake()
    async with first:
        await gateway.refresh()
        exchange = start(gateway)
        await until_dead(first)
        async with second:
            await gateway.refresh()
            fleet = get_engine_client().fleet
            silent = fleet.get(first.replica_id)
            assert silent is not None
            silent.changed_at -= protocol.HEARTBEAT_TIMEOUT_S
            events = await read(exchange)
    assert text_of(events) == expected_text(tokenizer)


def kind(weights: str = "w", **fields: str) -> Numerics:
    return Numerics(weights=weights, isa=fields.pop("isa", "avx2"), dtype="float32", **fields)


async def resumed_by(gateway: Gateway, first: FakeReplica, *replicas: FakeReplica) -> list[Any]:
    """The events of a stream whose replica dies when these are there already."""
    async with first, contextlib.AsyncExitStack() as stack:
        await gateway.refresh()
        exchange = start(gateway, stream_options={"include_usage": True})
        await until_dead(first)
        for other in replicas:
            await stack.enter_async_context(other)
        await gateway.refresh()
        await tell_of_death(gateway, first)
        return await read(exchange)


async def test_fault_60_a_stream_goes_on_where_the_same_bits_are_computed(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replicas = [gateway.fake(numerics=kind(isa=isa)) for isa in ("scalar", "avx2", "avx512")]
    events = await resumed_by(gateway, gateway.fake(die_after=10, numerics=kind()), *replicas)
    assert text_of(events) == expected_text(tokenizer)
    assert [len(other.received) for other in replicas] == [0, 1, 0]
    assert "numerics_changed" not in events[-2]["usage"]


@pytest.mark.parametrize("field", ["isa", "kernels", "quantization", "kv_cache_dtype"])
async def test_fault_60_a_replica_of_another_kind_takes_over_and_it_is_said(
    gateway: Gateway, tokenizer: Tokenizer, field: str
) -> None:
    other = gateway.fake(numerics=kind(**{field: "another"}))
    events = await resumed_by(gateway, gateway.fake(die_after=10, numerics=kind()), other)
    assert text_of(events) == expected_text(tokenizer)
    assert events[-2]["usage"]["numerics_changed"] is True


async def test_fault_60_other_weights_never_go_on_with_a_stream(
    gateway: Gateway, tokenizer: Tokenizer, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=0.3)
    other = gateway.fake(numerics=kind("others"))
    events = await resumed_by(gateway, gateway.fake(die_after=10, numerics=kind()), other)
    assert events[-1]["error"]["code"] == "model_replaced"
    assert text_of(events) == expected_text(tokenizer, count=10)
    assert other.received == []


async def test_a_stream_waits_for_no_replica_of_its_kind_that_only_encodes(
    gateway: Gateway, tokenizer: Tokenizer, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=0.3)
    role = KVHandover(role="kv_both", key_space="k", step_tokens=4, ec_role="ec_producer")
    encoder = gateway.fake(numerics=kind(), kv_handover=role)
    other = gateway.fake(numerics=kind(isa="avx512"))
    events = await resumed_by(gateway, gateway.fake(die_after=10, numerics=kind()), encoder, other)
    assert text_of(events) == expected_text(tokenizer)
    assert (len(encoder.received), len(other.received)) == (0, 1)


async def test_while_only_an_encoding_replica_is_there_nothing_is_said_of_other_weights(
    gateway: Gateway, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=0.3)
    role = KVHandover(role="kv_both", key_space="k", step_tokens=4, ec_role="ec_producer")
    async with gateway.serving(gateway.fake(kv_handover=role)) as encoder:
        answer = await gateway.client.chat()
    assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")
    assert "No replica serves the model" in answer.error["message"]
    assert encoder.received == []


async def test_a_spare_takes_requests_only_while_nobody_else_does(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    spare, first = gateway.fake(spare=True), gateway.fake(die_after=30)
    async with spare:
        async with first:
            await gateway.refresh()
            exchange = start(gateway)
            await until_dead(first)
            assert spare.received == []
            await tell_of_death(gateway, first)
            assert text_of(await read(exchange)) == expected_text(tokenizer)
            assert len(spare.received) == 1
        async with gateway.fake() as back:
            await gateway.refresh()
            await read(start(gateway))
            assert (len(spare.received), len(back.received)) == (1, 1)


async def test_fault_57_what_no_client_got_is_not_billed(gateway: Gateway, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=0.3)
    replica = gateway.fake(die_after=9)
    async with replica:
        await gateway.refresh()
        asked = gateway.client.open("POST", "/v1/chat/completions", chat_body(max_tokens=COUNT))
        await until_dead(replica)
        await tell_of_death(gateway, replica)
        reply = await asyncio.wait_for(asked.reply(), 60)
    assert reply.status == 503
    (usage,) = await gateway.usage()
    assert (usage.status, usage.prompt_tokens, usage.completion_tokens) == (503, 0, 0)
