"""FAULT 49: a stream goes on at another gateway from its last event, and nothing is doubled."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.contract.replica_state import Numerics
from engine.contract.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from inference.engine_client.client import get_engine_client
from inference.generation import continuity
from inference.generation.takeover import defer_settlement, request_fingerprint
from inference.request.position import StreamPosition
from metering.open_requests import GATEWAY, open_key
from tests.inference.asgi_client import Reply
from tests.inference.conftest import Gateway, until
from tests.inference.scripted import says

CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "Łódź", "deep": true}}\n</tool_call>'
TEXT = 'One day 🙂 a fox met a crow — and both of them said: "good morning, dear neighbour".'
TOOL = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    "chat-logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "chat-several": ("/v1/chat/completions", CHAT | {"n": 3, "temperature": 1, "seed": 3}),
    "chat-stop": ("/v1/chat/completions", CHAT | {"stop": ["both of"], "logit_bias": {"7": 1}}),
    "chat-tool": (
        "/v1/chat/completions",
        CHAT | {"tools": [{"type": "function", "function": TOOL}]},
    ),
    "completion": (
        "/v1/completions",
        {"model": "fake", "prompt": ["hello", "you"], "echo": True, "max_tokens": 30},
    ),
    "messages": (
        "/v1/messages",
        CHAT | {"max_tokens": 200},
    ),
    "messages-tool": (
        "/v1/messages",
        {
            **CHAT,
            "max_tokens": 200,
            "tools": [{"name": "look", "input_schema": TOOL["parameters"]}],
        },
    ),
    "responses": ("/v1/responses", {"model": "fake", "input": "hello", "store": False}),
    "responses-tool": (
        "/v1/responses",
        {"model": "fake", "input": "hello", "tools": [{"type": "function", **TOOL}]},
    ),
}


@pytest.fixture
async def storyteller(gateway: Gateway, tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    """A gateway whose replica says the same each time, token by token."""
    script = says(tokenizer, TEXT + CALL, TEXT, "Short.")
    async with gateway.serving(gateway.scripted(script)):
        yield gateway


async def ask(gateway: Gateway, kind: str, after: str | None = None) -> Reply:
    path, body = REQUESTS[kind]
    headers = {} if after is None else {"last-event-id": after}
    exchange = gateway.client.open("POST", path, body | {"stream": True}, headers=headers)
    reply = await asyncio.wait_for(exchange.reply(), 60)
    await get_engine_client().journal.save()
    return reply


def events(reply: Reply) -> list[tuple[str, str]]:
    """(id, the rest) of each event."""
    resumptions = []
    for block in reply.body.decode().split("\n\n")[:-1]:
        block = block.removeprefix(": keep-alive\n")
        first, _, rest = block.partition("\n")
        if block.startswith("event: ping"):  # nothing but life
            continue
        assert first.startswith("id: "), block
        resumptions.append((first[4:], rest))
    return resumptions


def texts_by_kind(chunks: list[tuple[str, str]]) -> dict[str, list[Any]]:
    """What events tell, however text is cut and outputs take turns: each field's own story."""
    out: dict[str, list[Any]] = {}
    for _, block in chunks:
        for name, what in news(block):
            story = out.setdefault(name, [])
            if story and name.endswith("+"):
                story[0] += what
            else:
                story.append(what)
    return out


def news(block: str) -> list[tuple[str, Any]]:
    """What an event tells, field by field."""
    data = block.rpartition("data: ")[2]
    return [("end", data)] if data == "[DONE]" else flat(json.loads(data))


def turns(every: list[tuple[str, str]]) -> set[int]:
    """The last events before what is told changes: text ends, a call begins, and the like."""
    fields = [[re.sub(r"^\d+", "", name) for name, _ in news(block)] for _, block in every]
    return {index for index in range(len(every) - 1) if fields[index] != fields[index + 1]}


def flat(event: dict[str, Any]) -> list[tuple[str, Any]]:
    """An event as fields; those that grow by pieces end in "+"."""
    event.pop("sequence_number", None)
    parts: list[tuple[str, Any]] = []
    for choice in event.get("choices") or ():
        index = choice["index"]
        delta = choice.get("delta") or {"content": choice.get("text", "")}
        calls = delta.pop("tool_calls", [])
        parts += [(f"{index}.{name}+", text) for name, text in delta.items() if text]
        for call in calls:
            parts += [(f"{index}.call.id", call["id"])] if "id" in call else []
            parts += [(f"{index}.call.name", n)] if (n := call["function"].get("name")) else []
            parts.append((f"{index}.call.arguments+", call["function"]["arguments"]))
        if choice.get("logprobs"):
            for entry in choice["logprobs"].get("content", []):
                parts.append((f"{index}.logprob", (entry["token"], entry["logprob"])))
        if choice.get("finish_reason"):
            parts.append((f"{index}.finish", (choice["finish_reason"], choice["stop_reason"])))
    if "choices" in event:
        return parts + ([("usage", event["usage"])] if event.get("usage") else [])
    delta = event.get("delta")
    if isinstance(delta, str):
        return [(f"{event['type']}.{event['item_id']}+", delta)]
    grown = ("text_delta", "input_json_delta", "thinking_delta")
    if isinstance(delta, dict) and delta.get("type") in grown:
        return [(f"{event['index']}.{delta.pop('type')}+", next(iter(delta.values())))]
    event_text = json.dumps(event, sort_keys=True)
    return [("event", re.sub(r'"completed_at": \d+', "", event_text))]


@pytest.mark.parametrize("kind", REQUESTS)
async def test_fault_49_a_stream_goes_on_from_any_of_its_events(
    storyteller: Gateway, kind: str
) -> None:
    full_response = await ask(storyteller, kind)
    assert full_response.status == 200, full_response.body
    every = events(full_response)
    assert len({event_id for event_id, _ in every}) == len(every)
    # Between turns all is alike: a few will do, and other ones of each kind.
    step = max(1, len(every) // 8)
    between = range([*REQUESTS].index(kind) * step // len(REQUESTS), len(every), step)
    for position in sorted({0, 1, *turns(every), *between, len(every) - 2, len(every) - 1}):
        rest = await ask(storyteller, kind, after=every[position][0])
        assert rest.status == 200, rest.body
        both = every[: position + 1] + events(rest)
        assert texts_by_kind(both) == texts_by_kind(every), (position, every[position])


async def half(gateway: Gateway) -> tuple[bytes, str]:
    """A chat's first events, and the id of the last one: then its client left."""
    path, body = REQUESTS["chat"]
    exchange = gateway.client.open("POST", path, body | {"stream": True})
    seen = b""
    await exchange.head()
    async for chunk in exchange.chunks():
        seen += chunk
        if seen.count(b"\n\n") >= 9:
            break
    await exchange.leave()
    await gateway.usage()
    await get_engine_client().journal.save()
    had = seen[: seen.rfind(b"\n\n") + 2]
    return had, re.findall(r"^id: (.*)$", had.decode(), re.MULTILINE)[-1]


def content(stream: bytes) -> str:
    chunks = re.findall(r'"content":"((?:[^"\\]|\\.)*)"', stream.decode())
    return "".join(json.loads(f'"{chunk}"') for chunk in chunks)


async def test_fault_49_a_stream_whose_client_left_goes_on_and_is_billed_once(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    script = says(tokenizer, TEXT)
    tokens = len(tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    async with gateway.serving(gateway.scripted(script, token_delay=0.02)):
        had, last = await half(gateway)
        rest = await ask(gateway, "chat", after=last)
        assert rest.status == 200, rest.body
        assert content(had + rest.body) == TEXT
        rows = await gateway.usage()
    assert sum(row.completion_tokens for row in rows) == tokens
    assert sum(row.prompt_tokens for row in rows) == rows[0].prompt_tokens
    assert len({row.request_id for row in rows}) == len(rows) == 2


async def test_fault_49_a_take_over_whose_client_leaves_midway_holds_nothing_and_is_billed_once(
    gateway: Gateway, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = len(tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    started_event, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(*args: Any) -> Any:
        settled = await defer_settlement(*args)
        started_event.set()
        await go_on.wait()
        return settled

    async with gateway.serving(gateway.scripted(says(tokenizer, TEXT), token_delay=0.02)):
        had, last = await half(gateway)
        with monkeypatch.context() as patch:
            patch.setattr(continuity, "defer_settlement", slowly)
            path, body = REQUESTS["chat"]
            headers = {"last-event-id": last}
            exchange = gateway.client.open("POST", path, body | {"stream": True}, headers=headers)
            await started_event.wait()
            assert await gateway.redis.hlen(open_key(GATEWAY)) == 1
            await exchange.leave()
            go_on.set()
            await gateway.usage()
        assert await gateway.redis.hlen(open_key(GATEWAY)) == 0
        rest = await ask(gateway, "chat", after=last)
        assert content(had + rest.body) == TEXT
        rows = await gateway.usage()
    assert sum(row.completion_tokens for row in rows) == tokens
    assert sum(row.prompt_tokens for row in rows) == rows[0].prompt_tokens


@pytest.mark.parametrize(
    ("other_numerics", "chosen", "changed"),
    [
        (("w avx512", "w avx2", "v avx2"), "w avx2", False),
        (("v avx2", "w avx512"), "w avx512", True),
    ],
)
async def test_fault_60_a_stream_that_another_gateway_goes_on_with_keeps_its_bits_where_it_can(
    gateway: Gateway,
    tokenizer: Tokenizer,
    other_numerics: tuple[str, ...],
    chosen: str,
    changed: bool,
) -> None:
    script = says(tokenizer, TEXT)
    async with gateway.scripted(script, token_delay=0.02, numerics=numerics("w avx2")):
        await gateway.refresh()
        had, last = await half(gateway)
    async with contextlib.AsyncExitStack() as stack:
        replicas = {
            name: await stack.enter_async_context(gateway.scripted(script, numerics=numerics(name)))
            for name in other_numerics
        }
        await gateway.refresh()
        rest = await ask(gateway, "chat", after=last)
        assert content(had + rest.body) == TEXT
        assert [name for name, replica in replicas.items() if replica.received] == [chosen]
    assert (b'"numerics_changed":true' in rest.body) is changed


async def test_fault_60_other_weights_never_go_on_with_a_stream_of_another_gateway(
    gateway: Gateway, tokenizer: Tokenizer, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=0.3)
    script = says(tokenizer, TEXT)
    async with gateway.scripted(script, token_delay=0.02, numerics=numerics("w avx2")):
        await gateway.refresh()
        _, last = await half(gateway)
    async with gateway.serving(gateway.scripted(script, numerics=numerics("v avx2"))) as other:
        rest = await ask(gateway, "chat", after=last)
        assert b'"model_replaced"' in rest.body
        assert other.received == []


def numerics(text: str) -> Numerics:
    weights, isa = text.split()
    return Numerics(weights=weights, isa=isa)


async def test_fault_49_a_stream_is_noted_as_told_once_its_first_tokens_have_been_written(
    gateway: Gateway,
) -> None:
    """Should the gateway be killed, a stream of which its client has nothing isn't billed."""
    path, body = REQUESTS["chat"]
    async with gateway.serving(gateway.fake(token_delay=0.5, eos_after=2)) as replica:
        exchange = gateway.client.open("POST", path, body | {"stream": True})
        await until(lambda: replica.received)
        (name,) = await gateway.redis.keys(f"{gateway.prefix}:stream:*")
        await exchange.head()
        exchange.accept.clear()  # the tokens come, and stand before the client's connection
        await asyncio.sleep(0.6)
        assert not await gateway.redis.hexists(name, "told")
        exchange.accept.set()
        assert [chunk async for chunk in exchange.chunks()]
        assert await gateway.redis.hexists(name, "told")
        await exchange.leave()


async def test_a_stream_is_its_keys_and_its_requests_alone(storyteller: Gateway, rows: Any) -> None:
    from common.db import run_in_db_thread
    from tenants import actions
    from tenants.actors import SYSTEM_ACTOR

    full_response = await ask(storyteller, "chat")
    last = events(full_response)[4][0]
    other = await ask(storyteller, "chat-stop", after=last)
    assert (other.status, other.error["param"]) == (400, "Last-Event-ID")
    for bad in ("x", "chatcmpl-1:2:3", last + "0" * 3000):
        refused = await ask(storyteller, "chat", after=bad)
        assert (refused.status, refused.error["param"]) == (400, "Last-Event-ID")
    finished = last + "."  # which it hadn't: nothing would ever come
    unknown = re.sub("-[0-9a-f]{32}", "-" + "0" * 32, last)
    beyond = re.sub(r":\d+$", ":9999", last)
    for gone in (unknown, beyond, finished):
        reply = await ask(storyteller, "chat", after=gone)
        assert (reply.status, reply.error["code"]) == (404, "stream_not_found")

    def other_secrets() -> list[str]:
        stranger = actions.create_tenant(actor=SYSTEM_ACTOR, name="Stranger")
        local_tenant, key = rows.tenant, rows.key
        return [
            actions.create_key(actor=SYSTEM_ACTOR, tenant=stranger, name="k").secret,
            actions.create_key(actor=SYSTEM_ACTOR, tenant=local_tenant, name="k").secret,
            actions.rotate_key(actor=SYSTEM_ACTOR, key=key, overlap=timedelta(days=1)).secret,
        ]

    path, body = REQUESTS["chat"]
    outcomes = []
    for secret in await run_in_db_thread(other_secrets):
        headers = {"last-event-id": last, "authorization": f"Bearer {secret}"}
        exchange = storyteller.client.open("POST", path, body | {"stream": True}, headers=headers)
        reply = await asyncio.wait_for(exchange.reply(), 60)
        outcomes.append((reply.status, reply.error["code"] if reply.status != 200 else ""))
    # A stranger's key, another one of the tenant, and the one that follows the stream's.
    gone = (404, "stream_not_found")
    assert outcomes == [gone, gone, (200, "")]


def test_ids_say_where_a_client_is() -> None:
    stream = "chatcmpl-" + "a" * 32
    position = StreamPosition.parse(f"{stream}:9:4,17.,0:1.12.2")
    assert (position.counts, position.finished) == ([4, 17, 0], [False, True, False])
    assert (position.events, position.output, position.start, position.part) == (9, 1, 12, 2)
    assert StreamPosition.parse(f"{stream}:2:b2").stage == "b"


@pytest.mark.parametrize("count", [1, 15, 16, 64])
def test_a_requests_print_is_that_of_all_its_prompts(count: int) -> None:
    """Though it goes through them one by one: a gateway of an earlier version makes the same."""
    prompts = [[number, 70_000, 3] for number in range(count)]
    sampling = SamplingParams(logit_bias={5: 1.0})
    job: Any = SimpleNamespace(
        model=SimpleNamespace(name="m"),
        endpoint="e",
        sampling=sampling,
        prompts=prompts,
        embeds=[],
        media=[],
    )
    token_ids = msgspec.msgpack.encode(msgspec.to_builtins(sampling, str_keys=True), order="sorted")
    full_sha256 = hashlib.sha256(b"m\0e\0" + token_ids + msgspec.msgpack.encode(prompts))
    assert request_fingerprint(job) == full_sha256.digest()
