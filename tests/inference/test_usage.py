"""What ran is billed, once; what is abandoned is aborted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.text.chat_template import render_chat
from engine.text.tokenizer import Tokenizer
from inference.engine_client.client import get_engine_client
from tests.fakes.fake_replica import FakeReplica
from tests.inference.asgi_client import Exchange, chat_body
from tests.inference.conftest import Gateway, until
from tests.inference.scripted import says

CHAT = "/v1/chat/completions"


async def until_idle(replica: FakeReplica) -> None:
    await until(lambda: not replica.running)


def opened(gateway: Gateway, **fields: Any) -> Exchange:
    return gateway.client.open("POST", CHAT, chat_body(max_tokens=500, **fields))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_record(
    gateway: Gateway, tokenizer: Tokenizer, stream: bool
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "one two"))):
        reply = await gateway.client.chat(stream=stream, n=2)
    assert reply.status == 200
    (usage,) = await gateway.usage()
    prompt = render_chat(tokenizer, [{"role": "user", "content": "hello"}])
    assert usage.request_id.startswith("chatcmpl-")
    assert usage.tenant_id == gateway.rows.tenant.pk
    assert (usage.key_id, usage.user_id) == (gateway.rows.key.pk, None)
    assert (usage.endpoint, usage.model, usage.stream) == ("chat.completions", "fake", stream)
    assert usage.prompt_tokens == len(prompt)
    assert usage.completion_tokens == 2 * (len(tokenizer.encode("one two")) + 1)
    assert (usage.finish_reason, usage.status) == ("stop", 200)
    assert usage.ttft_ms is not None
    assert 0 < usage.ttft_ms <= usage.duration_ms


async def test_cached_tokens_are_told_and_never_more_than_the_prompt(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    original = replica._advance

    def advance(request: Any, sequence: Any) -> Any:
        delta = original(request, sequence)
        delta.num_cached_tokens = 8 if delta.num_prompt_tokens else 0
        return delta

    replica._advance = advance  # type: ignore[method-assign]
    async with gateway.serving(replica):
        body = (await gateway.client.chat()).json()
        tiny = (await gateway.client.complete([5, 6])).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert tiny["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert [usage.cached_tokens for usage in await gateway.usage()] == [8, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_fault_25_a_client_that_leaves_while_it_is_answered(
    gateway: Gateway, stream: bool
) -> None:
    replica = gateway.fake(token_delay=0.005)
    async with gateway.serving(replica):
        exchange = opened(gateway, stream=stream)
        await until(lambda: replica.steps >= 10)
        steps = replica.steps
        await exchange.leave()
        await until_idle(replica)
        assert replica.steps - steps < 60, "it ran on to the end"
        (usage,) = await gateway.usage()
        assert len(replica.aborted) == 1
    assert (usage.status, usage.finish_reason) == (499, "abort")
    assert 5 <= usage.completion_tokens < 100
    assert usage.prompt_tokens > 0
    assert get_engine_client().flights == []


async def test_fault_25_a_client_that_leaves_while_it_is_queued_pays_nothing(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"), load_seconds=60.0)
    async with gateway.serving(gateway.fake()):
        pass
    async with replica:
        replica.state = "ready"
        await replica._beat()
        await gateway.refresh()
        replica.state = "loading"
        exchange = opened(gateway)
        await until(lambda: replica.running)
        await exchange.leave()
        await until(lambda: replica.aborted)  # it was still queued when this came
        replica.state = "ready"
        await until_idle(replica)
        (usage,) = await gateway.usage()
    assert (usage.status, usage.prompt_tokens, usage.completion_tokens) == (499, 0, 0)


async def test_fault_25_a_client_that_leaves_in_prefill_pays_for_the_prompt(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "x" * 400), load_seconds=60.0)
    original = replica._advance

    def silent(request: Any, sequence: Any) -> Any:
        sequence.first = False  # its prompt is being computed: steps, but no tokens
        return original(request, sequence)

    replica._advance = silent  # type: ignore[method-assign]
    async with replica:
        replica.state = "ready"
        await replica._beat()
        await gateway.refresh()
        replica.state = "loading"
        exchange = opened(gateway)
        await until(lambda: replica.running)
        await exchange.leave()
        replica.state = "ready"
        await until_idle(replica)
        (usage,) = await gateway.usage()
    assert usage.prompt_tokens > 0
    assert (usage.status, usage.completion_tokens) == (499, 0)


async def test_fault_25_a_stream_that_nobody_starts_to_read_is_cleaned_up(
    gateway: Gateway,
) -> None:
    replica = gateway.fake(token_delay=0.005)
    async with gateway.serving(replica):
        exchange = opened(gateway, stream=True)
        exchange.accept.clear()  # not even the head is taken
        await until(lambda: replica.steps >= 5)
        exchange.gone.set()
        await until_idle(replica)
        (usage,) = await gateway.usage()
    assert usage.status == 499
    exchange.accept.set()


async def test_fault_26_a_slow_reader_gets_everything_in_few_large_chunks(
    gateway: Gateway,
) -> None:
    replica = gateway.fake()
    async with gateway.serving(replica):
        fast = await gateway.client.chat(max_tokens=300, stream=True)
        exchange = gateway.client.open("POST", CHAT, chat_body(max_tokens=300, stream=True))
        await exchange.head()
        exchange.accept.clear()
        await until_idle(replica)
        neighbour = await gateway.client.chat(max_tokens=20)
        exchange.accept.set()
        chunks = [chunk async for chunk in exchange.chunks()]
    assert neighbour.status == 200

    def text(body: bytes) -> str:
        from tests.inference.asgi_client import parse_events

        return "".join(
            choice["delta"].get("content", "")
            for event in parse_events(body)[:-1]
            for choice in event["choices"]
        )

    assert text(b"".join(chunks)) == text(fast.body)
    assert len(chunks) < 50, "what piled up was merged"


async def test_an_error_of_the_engine_is_billed_for_what_ran(gateway: Gateway) -> None:
    from engine.contract.messages import ErrorInfo

    replica = gateway.fake()
    original = replica._advance

    def failing(request: Any, sequence: Any) -> Any:
        delta = original(request, sequence)
        if delta.start == 7:
            delta.finish_reason, delta.error = "error", ErrorInfo(message="a NaN", code="nan")
            sequence.num_tokens = -1
        return delta

    replica._advance = failing  # type: ignore[method-assign]
    async with gateway.serving(replica):
        reply = await gateway.client.chat()
    assert (reply.status, reply.error["code"]) == (500, "nan")
    (usage,) = await gateway.usage()
    assert (usage.completion_tokens, usage.status, usage.finish_reason) == (7, 500, "error")


async def test_many_requests_at_once_are_all_answered_and_billed(gateway: Gateway) -> None:
    async with gateway.serving(gateway.fake()):
        replies = await asyncio.gather(
            *(gateway.client.chat(str(i), max_tokens=10, stream=bool(i % 2)) for i in range(64))
        )
        usage = await gateway.usage()
    assert {reply.status for reply in replies} == {200}
    assert len({record.request_id for record in usage}) == len(usage) == 64
    assert all(record.completion_tokens == 10 for record in usage)
    assert get_engine_client().flights == []


async def test_the_clients_request_id_does_not_key_the_bill(served: Gateway) -> None:
    for _ in range(2):
        await served.client.post(CHAT, chat_body(), headers={"x-request-id": "same"})
    ids = {record.request_id for record in await served.usage()}
    assert len(ids) == 2
    assert "same" not in ids


async def test_the_headers_id_is_found_in_the_ledger(served: Gateway) -> None:
    for reply in (await served.client.chat(max_tokens=2), await served.client.complete("x")):
        header, body = reply.headers["x-request-id"], reply.json()
        assert header.startswith("req-")
        assert body["id"].split("-")[1] == header.split("-")[1]
        assert body["id"] in [record.request_id for record in await served.usage()]


async def test_several_jobs_of_one_request_have_ids_of_their_own(served: Gateway) -> None:
    messages = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
    body = {"model": "fake", "messages": messages, "max_tokens": 2}
    reply = await served.client.post("/v1/chat/completions/batch", body)
    assert reply.status == 200
    replies = await asyncio.gather(*[served.client.chat(max_tokens=1) for _ in range(20)])
    assert len({reply.json()["id"] for reply in replies}) == 20
    ids = [record.request_id for record in await served.usage()]
    assert len(ids) == len(set(ids))
    assert sum(record.completion_tokens for record in await served.usage()) == 3 * 2 + 20
