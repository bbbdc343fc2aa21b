"""What tests of streams that lose their replicas share: one stream, deaths and their news."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import ReplicaEvent
from engine.text.chat_template import render_chat
from engine.text.tokenizer import Tokenizer
from tests.fakes.fake_replica import FakeReplica
from tests.inference.asgi_client import Exchange, chat_body
from tests.inference.conftest import Gateway, generated_tokens, until

#: Tokens of the stream.
COUNT = 60


def expected_text(tokenizer: Tokenizer, index: int = 0, count: int = COUNT) -> str:
    prompt = render_chat(tokenizer, [{"role": "user", "content": "hello"}])
    return tokenizer.decode(generated_tokens(prompt, count, index))


def start(gateway: Gateway, **fields: Any) -> Exchange:
    body = chat_body(stream=True, max_tokens=COUNT, **fields)
    return gateway.client.open("POST", "/v1/chat/completions", body)


async def read(exchange: Exchange) -> list[Any]:
    reply = await asyncio.wait_for(exchange.reply(), 60)
    assert reply.status == 200, reply.body
    return reply.events


def text_of(events: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for event in events
        if isinstance(event, dict) and "choices" in event
        for choice in event["choices"]
        if choice["index"] == index
    )


async def until_dead(replica: FakeReplica) -> None:
    await until(lambda: replica.state == "dead")


async def expire(gateway: Gateway, replica: FakeReplica) -> None:
    """What the heartbeat's TTL does to a dead replica, without the wait."""
    await gateway.redis.delete(redis_keys.replica_key(replica.replica_id, gateway.prefix))


async def tell_of_death(
    gateway: Gateway, replica: FakeReplica, in_flight_ids: list[str] | None = None
) -> None:
    """What a supervisor does when a replica's process ends; here the heartbeat stays."""
    news = ReplicaEvent(
        replica_id=replica.replica_id, incarnation=replica.incarnation, held=in_flight_ids
    )
    for _ in range(1000):  # the gateway may not listen yet
        if await gateway.redis.publish(
            redis_keys.replica_events_channel(gateway.prefix), protocol.encode(news)
        ):
            return
        await asyncio.sleep(0.01)
    pytest.fail("No gateway listens.")
