"""Prompts that are computed on a prefill replica and answered on another one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from engine.contract import redis_keys
from engine.contract.messages import EngineRequest, MediaItem
from engine.contract.replica_state import KVHandover
from engine.contract.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from inference.engine_client.client import get_engine_client
from inference.engine_client.failover import _base_request_ids
from inference.engine_client.flight import Submission
from tests.fakes.fake_replica import FakeReplica
from tests.inference.conftest import Gateway, until
from tests.inference.failing_over import (
    expected_text,
    read,
    start,
    tell_of_death,
    text_of,
    until_dead,
)

#: Of fakes: "hello" as a chat has more tokens than a step.
STEP = 4


#: Where a prefill replica serves its blocks.
ADDRESS = "tcp://10.0.0.1:5600"


def handover(
    role: str, key_space: str = "k", step_tokens: int = STEP, address: str = "", ec_role: str = ""
) -> KVHandover:
    return KVHandover(
        role=role, key_space=key_space, step_tokens=step_tokens, address=address, ec_role=ec_role
    )


@asynccontextmanager
async def two(gateway: Gateway, **prefill: Any) -> AsyncIterator[tuple[FakeReplica, FakeReplica]]:
    """A prefill and a decode replica."""
    async with AsyncExitStack() as stack:
        options = {"kv_handover": handover("kv_producer"), **prefill}
        producer = await stack.enter_async_context(gateway.fake(**options))
        consumer = gateway.fake(kv_handover=handover("kv_consumer"))
        await stack.enter_async_context(consumer)
        await gateway.refresh()
        yield producer, consumer


async def test_a_long_prompt_is_computed_on_a_prefill_replica_and_answered_on_another(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with two(gateway) as (producer, consumer):
        assert text_of(await read(start(gateway, n=2))) == expected_text(tokenizer)
    (prefill,), (decode,) = producer.received, consumer.received
    assert prefill.prompt_token_ids == decode.prompt_token_ids
    assert (prefill.sampling.num_sequences, prefill.sampling.max_tokens) == (1, 1)
    assert (prefill.cache_namespace, prefill.tenant) == (decode.cache_namespace, decode.tenant)
    assert decode.cache_namespace
    assert redis_keys.is_prefill_request(prefill.request_id)
    assert (prefill.prefilled, decode.prefilled) == (False, True)
    (usage,) = await gateway.usage()
    assert (usage.prompt_tokens, usage.status) == (len(prefill.prompt_token_ids), 200)
    # What nobody reads isn't among the tokens that the ledger is held against.
    written = await gateway.redis.hkeys(redis_keys.written_tokens_key(gateway.prefix))
    assert not [field for field in written if redis_keys.is_prefill_request(field.decode())]


async def test_the_replica_that_answers_hears_where_the_prompts_blocks_are(
    gateway: Gateway,
) -> None:
    serving = handover("kv_producer", address=ADDRESS)
    async with two(gateway, kv_handover=serving) as (producer, consumer):
        await read(start(gateway))
    assert [request.kv_peer for request in producer.received] == [""]
    assert [request.kv_peer for request in consumer.received] == [ADDRESS]
    # It reads the blocks while the prompt is being computed.
    [followed] = consumer.followed
    assert followed.kv_peer == ADDRESS
    assert followed.prompt_token_ids == consumer.received[0].prompt_token_ids
    assert followed.cache_namespace == consumer.received[0].cache_namespace


async def test_a_client_can_name_no_host_but_one_of_the_models_replicas(gateway: Gateway) -> None:
    """Replicas would connect to any that it likes."""
    both = handover("kv_both", address=ADDRESS)
    async with gateway.serving(gateway.fake(kv_handover=both)) as replica:
        first = await gateway.client.chat(kv_transfer_params={"do_remote_decode": True})
        params = first.json()["kv_transfer_params"]
        assert (params["remote_host"], params["remote_port"]) == ("10.0.0.1", 5600)
        for host, port in (("10.0.0.1", 5600), ("10.0.0.1", 5601), ("metadata.internal", 80)):
            answer = await gateway.client.chat(
                kv_transfer_params=params | {"remote_host": host, "remote_port": port}
            )
            assert answer.status == 200
    assert [request.prefilled for request in replica.received] == [False, True, True, True]
    assert [request.kv_peer for request in replica.received] == ["", ADDRESS, "", ""]


async def test_a_prompt_that_was_answered_a_moment_ago_needs_no_prefill_replica(
    gateway: Gateway,
) -> None:
    async with two(gateway) as (producer, consumer):
        for _ in range(3):
            await read(start(gateway))
    assert (len(producer.received), len(consumer.received)) == (1, 3)


async def test_a_prompt_is_computed_on_the_prefill_replica_again_for_a_new_decode_replica(
    gateway: Gateway,
) -> None:
    async with gateway.serving(gateway.fake(kv_handover=handover("kv_producer"))) as producer:
        for _ in range(2):
            async with gateway.serving(gateway.fake(kv_handover=handover("kv_consumer"))):
                await read(start(gateway))
            await gateway.refresh()
    received = [redis_keys.is_prefill_request(request.request_id) for request in producer.received]
    assert received == [True, True]


@pytest.mark.parametrize(
    "theirs",
    [handover("kv_producer", key_space="other"), handover("kv_both"), None],
    ids=["other blocks", "no producer", "no tier"],
)
async def test_a_replica_whose_blocks_others_cant_load_computes_no_prompt_for_them(
    gateway: Gateway, theirs: KVHandover | None
) -> None:
    async with two(gateway, kv_handover=theirs) as (producer, consumer):
        await read(start(gateway))
    received = [*producer.received, *consumer.received]
    assert [request.prefilled for request in received] == [False]


@asynccontextmanager
async def encoding(gateway: Gateway, **options: Any) -> AsyncIterator[list[FakeReplica]]:
    """A replica that encodes, and one that answers."""
    async with AsyncExitStack() as stack:
        handovers = [handover("kv_both", ec_role=role) for role in ("ec_producer", "ec_consumer")]
        fakes = [
            gateway.fake(kv_handover=handovers[0], **options),
            gateway.fake(kv_handover=handovers[1]),
        ]
        for fake in fakes:
            await stack.enter_async_context(fake)
        await gateway.refresh()
        yield fakes


def submit_picture(
    gateway: Gateway,
    *,
    has_picture: bool = True,
    first: int = 10,
    length: int = 20,
    namespace: str = "",
) -> Submission:
    """A prompt of `length` tokens from `first` on, of which the 4th to 7th stand for a picture."""
    item = MediaItem("image", b"d" * 32, ((3, 4),), (1, 4, 4))
    request = EngineRequest(
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        gateway_id="",
        prompt_token_ids=list(range(first, first + length)),
        cache_namespace=namespace,
        media=[item] if has_picture else [],
        media_data={item.digest: b"pixels"} if has_picture else {},
        sampling=SamplingParams(max_tokens=3),
    )
    return get_engine_client().submit([request], "fake")


async def tokens_of(submission: Submission) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < 3:
        chunks = await asyncio.wait_for(submission.next_chunks(), 60)
        tokens += [token for chunk in chunks for token in chunk.token_ids]
    return tokens


async def test_a_prompt_with_media_is_encoded_on_a_replica_that_does_nothing_else(
    gateway: Gateway,
) -> None:
    async with encoding(gateway) as (encoder, answering):
        tokens = await tokens_of(submit_picture(gateway))
        assert await tokens_of(submit_picture(gateway, has_picture=False)) == tokens
        assert await tokens_of(submit_picture(gateway)) == tokens  # it is in the tier by now
    (encode,), (answer, other, again) = encoder.received, answering.received
    # Up to the picture's end.
    assert encode.prompt_token_ids == answer.prompt_token_ids[:7]
    assert encode.sampling.max_tokens == 1
    assert encode.media == answer.media
    assert encode.media_data == answer.media_data  # where it can't be loaded, it is encoded
    assert (answer.prefilled, other.prefilled, again.prefilled) == (True, False, False)


@pytest.mark.parametrize("address", ["", ADDRESS], ids=["storage", "memory"])
async def test_a_picture_is_encoded_once_for_all_prompts_of_a_tenant(
    gateway: Gateway, address: str
) -> None:
    """For each replica that reads it from the encoding one's memory."""
    serving = handover("kv_both", ec_role="ec_producer", address=address)
    async with gateway.serving(gateway.fake(kv_handover=serving)) as encoder:
        for _ in range(2):
            reading = handover("kv_both", ec_role="ec_consumer")
            async with gateway.serving(gateway.fake(kv_handover=reading)):
                for first in (10, 11):
                    for namespace in ("a", "b"):
                        prompt = submit_picture(gateway, first=first, namespace=namespace)
                        await tokens_of(prompt)
            await gateway.refresh()
    namespaces = [request.cache_namespace for request in encoder.received]
    assert namespaces == (["a", "b"] * 2 if address else ["a", "b"])


async def test_a_prompt_is_computed_on_a_prefill_replica_once_its_media_are_encoded(
    gateway: Gateway,
) -> None:
    other = "tcp://10.0.0.2:5600"
    roles = {
        "encode": handover("kv_both", ec_role="ec_producer", address=ADDRESS),
        "prefill": handover("kv_producer", ec_role="ec_consumer", address=other),
        "answer": handover("kv_consumer", ec_role="ec_consumer"),
    }
    async with AsyncExitStack() as stack:
        fakes = [
            await stack.enter_async_context(gateway.fake(replica_id=name, kv_handover=role))
            for name, role in roles.items()
        ]
        await gateway.refresh()
        tokens = await tokens_of(submit_picture(gateway))
        assert await tokens_of(submit_picture(gateway)) == tokens
    received = [fake.received for fake in fakes]
    assert [len(requests) for requests in received] == [1, 1, 2]
    first = [requests[0] for requests in received]
    assert [len(request.prompt_token_ids) for request in first] == [7, 20, 20]
    assert [(request.prefilled, request.kv_peer) for request in first] == [
        (False, ""),
        (True, ADDRESS),
        (True, other),
    ]


async def test_a_picture_that_the_prefill_replica_has_read_is_encoded_for_the_answering_one(
    gateway: Gateway,
) -> None:
    roles = [
        handover("kv_both", ec_role="ec_producer", address=ADDRESS),
        handover("kv_producer", ec_role="ec_consumer"),
        handover("kv_consumer", ec_role="ec_consumer", step_tokens=8),
    ]
    async with AsyncExitStack() as stack:
        encoder, producer, _ = [
            await stack.enter_async_context(gateway.fake(kv_handover=role)) for role in roles
        ]
        await gateway.refresh()
        for first, length in ((10, 20), (11, 8), (12, 8), (20, 20)):
            await tokens_of(submit_picture(gateway, first=first, length=length))
    # The short prompts are computed where they are answered.
    assert [request.prompt_token_ids[0] for request in encoder.received] == [10, 11]
    assert [request.prompt_token_ids[0] for request in producer.received] == [10, 20]


async def test_a_replica_that_only_encodes_answers_nothing(gateway: Gateway) -> None:
    role = handover("kv_both", ec_role="ec_producer")
    async with gateway.serving(gateway.fake(kv_handover=role)) as encoder:
        submission = submit_picture(gateway)
        await asyncio.sleep(0)
        assert submission.waiting
        submission.close()
    assert not encoder.received


async def test_a_replica_that_encodes_and_computes_prompts_gets_both_at_once(
    gateway: Gateway,
) -> None:
    async with AsyncExitStack() as stack:
        producer, consumer = [
            await stack.enter_async_context(gateway.fake(kv_handover=role))
            for role in (
                handover("kv_producer", ec_role="ec_producer"),
                handover("kv_consumer", ec_role="ec_consumer"),
            )
        ]
        await gateway.refresh()
        await tokens_of(submit_picture(gateway))
    assert [len(request.prompt_token_ids) for request in producer.received] == [20]
    assert [request.prefilled for request in consumer.received] == [True]


async def test_a_prefill_replica_reads_nothing_from_a_dead_one_that_encoded(
    gateway: Gateway,
) -> None:
    encoding_role = handover("kv_both", ec_role="ec_producer", address=ADDRESS)
    async with AsyncExitStack() as stack:
        encoder, producer, _ = [
            await stack.enter_async_context(fake)
            for fake in (
                gateway.fake(kv_handover=encoding_role, die_after=0),
                gateway.fake(kv_handover=handover("kv_producer", ec_role="ec_consumer")),
                gateway.fake(kv_handover=handover("kv_consumer", ec_role="ec_consumer")),
            )
        ]
        await gateway.refresh()
        submission = submit_picture(gateway)
        await until_dead(encoder)
        await tell_of_death(gateway, encoder, [request.request_id for request in encoder.received])
        await tokens_of(submission)
    assert [request.kv_peer for request in producer.received] == [""]


async def test_media_whose_encoding_replica_dies_are_encoded_where_the_answer_is(
    gateway: Gateway,
) -> None:
    async with encoding(gateway, die_after=0) as (encoder, answering):
        submission = submit_picture(gateway)
        await until_dead(encoder)
        await tell_of_death(gateway, encoder, [request.request_id for request in encoder.received])
        assert len(await tokens_of(submission)) == 3
    (answer,) = answering.received
    assert not redis_keys.is_prefill_request(answer.request_id)
    assert answer.media_data


async def test_while_no_other_replica_serves_a_prefill_replica_answers(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(gateway.fake(kv_handover=handover("kv_producer"))):
        assert text_of(await read(start(gateway))) == expected_text(tokenizer)


async def test_a_prompt_whose_prefill_replica_dies_is_computed_where_it_is_answered(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with two(gateway, die_after=0) as (producer, consumer):
        exchange = start(gateway)
        await until_dead(producer)
        allocated_request_ids = [request.request_id for request in producer.received]
        await tell_of_death(gateway, producer, allocated_request_ids)
        assert text_of(await read(exchange)) == expected_text(tokenizer)
    (decode,) = consumer.received
    assert not redis_keys.is_prefill_request(decode.request_id)


def test_a_replica_that_dies_at_a_prompt_was_at_the_request_that_it_is_of() -> None:
    prefill_ids = [redis_keys.prefill_request_id("one~2"), "two~2", "three"]
    assert _base_request_ids(prefill_ids) == {"one", "two", "three"}


async def test_an_operator_aborts_a_request_whose_prompt_is_computed(
    operator: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = handover("kv_producer", address=ADDRESS)
    async with two(operator, kv_handover=serving) as (producer, consumer):
        proceed, step = asyncio.Event(), producer._step

        async def step_later() -> None:
            await proceed.wait()
            await step()

        monkeypatch.setattr(producer, "_step", step_later)
        exchange = start(operator, n=2)
        await until(lambda: producer.running and consumer.followed)
        await operator.client.post("/abort_requests")
        proceed.set()
        events = await read(exchange)
        await until(lambda: not consumer.followed)
    choices = [choice for event in events if isinstance(event, dict) for choice in event["choices"]]
    reasons = {choice["index"]: choice["finish_reason"] for choice in choices}
    assert reasons == {0: "abort", 1: "abort"}
    assert not consumer.received


async def test_a_client_that_leaves_while_its_prompt_is_computed_frees_both_replicas(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = handover("kv_producer", address=ADDRESS)
    async with two(gateway, kv_handover=serving) as (producer, consumer):
        proceed, step = asyncio.Event(), producer._step

        async def step_later() -> None:
            await proceed.wait()
            await step()

        monkeypatch.setattr(producer, "_step", step_later)
        exchange = start(gateway)
        await until(lambda: producer.received and consumer.followed)
        exchange.gone.set()
        await until(lambda: producer.aborted and not consumer.followed)
        assert get_engine_client().is_idle()
        proceed.set()
    assert not consumer.received


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/generate"])
async def test_a_client_that_plans_the_hand_over_itself_passes_kv_transfer_params_on(
    gateway: Gateway, path: str
) -> None:
    """As vLLM's proxies do: what the first answer says is the second request's."""
    body = {"token_ids": [5, 6, 7, 8, 9], "sampling_params": {"max_tokens": 1}}
    async with gateway.serving(gateway.fake(kv_handover=handover("kv_both"))) as replica:
        baseline_payload = (await gateway.client.post(path, body)).json()
        first = await gateway.client.post(
            path, body | {"kv_transfer_params": {"do_remote_decode": True, "remote_host": None}}
        )
        params = first.json()["kv_transfer_params"]
        second = await gateway.client.post(path, body | {"kv_transfer_params": params})
        replica.kv_transfer_params = {"remote_port": 5600}
        third = await gateway.client.post(path, body)
    assert baseline_payload["kv_transfer_params"] is second.json()["kv_transfer_params"] is None
    assert params["do_remote_prefill"] is True
    assert third.json()["kv_transfer_params"] == {"remote_port": 5600}  # of its KV connector
    assert [request.prefilled for request in replica.received] == [False, False, True, False]
    assert [request.do_remote_decode for request in replica.received] == [False, True, False, False]


async def test_a_client_passes_on_where_an_encoders_outputs_are(gateway: Gateway) -> None:
    both = gateway.fake(kv_handover=handover("kv_both", ec_role="ec_both", address=ADDRESS))
    # Its encoder reads prompts.
    both.model.max_encoder_tokens, both.model.decoder_start_ids = 12, [7, 8]
    async with gateway.serving(both) as replica:
        first = await gateway.client.complete("the fox")
        [(digest, remote)] = first.json()["ec_transfer_params"].items()
        assert (remote["remote_host"], remote["remote_port"]) == ("10.0.0.1", 5600)
        for params in (
            {digest: remote},
            {digest: remote | {"remote_host": "metadata.internal"}},
            {"d" * 64: remote},
        ):
            answer = await gateway.client.complete("the fox", ec_transfer_params=params)
            assert answer.status == 200
    assert [(request.prefilled, request.kv_peer) for request in replica.received] == [
        (False, ""),
        (True, ADDRESS),
        (True, ""),
        (False, ""),
    ]


async def test_encoder_outputs_of_two_replicas_are_refused_by_name(gateway: Gateway) -> None:
    remote = {"remote_host": "10.0.0.1", "remote_port": 5600}
    async with gateway.serving(gateway.fake()):
        for params, param in (
            ({"a": remote, "b": remote | {"remote_port": 5601}}, "ec_transfer_params"),
            ({"a": remote | {"remote_port": 0}}, "ec_transfer_params.a.remote_port"),
            ({"a": {"peer": "b"}}, "ec_transfer_params.a.peer"),
        ):
            answer = await gateway.client.chat(ec_transfer_params=params)
            assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_without_a_shared_tier_nothing_is_handed_over(gateway: Gateway) -> None:
    async with gateway.serving(gateway.fake()):
        answers = [
            await getattr(gateway.client, name)(
                **fields, kv_transfer_params={"do_remote_decode": True}
            )
            for name, fields in (("chat", {}), ("complete", {"prompt": "hello"}))
        ]
    assert [answer.json()["kv_transfer_params"] for answer in answers] == [None, None]


@pytest.mark.parametrize(
    ("name", "value"),
    [("remote_host", ""), ("remote_block_ids", [1]), ("remote_port", 65536), ("tp_size", 1)],
)
async def test_blocks_and_ports_that_are_none_are_refused_by_name(
    gateway: Gateway, name: str, value: Any
) -> None:
    async with gateway.serving(gateway.fake()):
        params = {"do_remote_prefill": True, name: value}
        answer = await gateway.client.chat(kv_transfer_params=params)
    assert answer.status == 400
    assert answer.json()["error"]["param"] == f"kv_transfer_params.{name}"
