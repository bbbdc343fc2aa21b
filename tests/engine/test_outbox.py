"""Outputs for a gateway that died don't stay in Redis for ever."""

from __future__ import annotations

import redis

from engine.contract import protocol
from engine.contract.protocol import OutboxBatch
from engine.serving.outbox import OutboxWriter, StepOutput


def write(client: redis.Redis, prefix: str, count: int = 1) -> None:
    writer = OutboxWriter(client, prefix, "r", "i")
    writer.start()
    for step in range(count):
        batch = OutboxBatch(replica_id="r", incarnation="i", step=step)
        writer.put(StepOutput({"gone": batch}))
    writer.close(10)


def test_fault_28_a_stream_that_is_made_anew_expires(redis_url: str, key_prefix: str) -> None:
    client = redis.Redis.from_url(redis_url)
    stream = protocol.outbox_key("gone", key_prefix)
    write(client, key_prefix, 3)
    assert client.xlen(stream) == 3
    assert 0 < client.ttl(stream) <= protocol.OUTBOX_TTL_S


def test_a_live_gateways_own_expiry_stays(redis_url: str, key_prefix: str) -> None:
    client = redis.Redis.from_url(redis_url)
    stream = protocol.outbox_key("gone", key_prefix)
    client.xadd(stream, {b"x": b"y"})
    client.expire(stream, 5000)
    write(client, key_prefix)
    assert client.ttl(stream) > protocol.OUTBOX_TTL_S
