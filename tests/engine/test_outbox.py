"""Outputs for a gateway that died don't stay in Redis for ever."""

from __future__ import annotations

import redis

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import ControlReply, OutboxBatch, TokenDelta
from engine.serving.outbox import OutboxWriter, StepOutput


def write(client: redis.Redis, prefix: str, count: int = 1) -> None:
    writer = OutboxWriter(client, prefix, "r", "i", lambda: None)
    writer.start()
    for step in range(count):
        batch = OutboxBatch(replica_id="r", incarnation="i", step=step)
        writer.put(StepOutput({"gone": batch}))
    writer.close(10)


def test_fault_28_a_stream_that_is_made_anew_expires(redis_url: str, key_prefix: str) -> None:
    client = redis.Redis.from_url(redis_url)
    stream = redis_keys.outbox_key("gone", key_prefix)
    write(client, key_prefix, 3)
    assert client.xlen(stream) >= 1
    assert 0 < client.ttl(stream) <= protocol.OUTBOX_TTL_S


def test_a_live_gateways_own_expiry_stays(redis_url: str, key_prefix: str) -> None:
    client = redis.Redis.from_url(redis_url)
    stream = redis_keys.outbox_key("gone", key_prefix)
    client.xadd(stream, {b"x": b"y"})
    client.expire(stream, 5000)
    write(client, key_prefix)
    assert client.ttl(stream) > protocol.OUTBOX_TTL_S


def test_fault_67_a_reply_comes_after_a_heartbeat_that_shows_its_effect(
    redis_url: str, key_prefix: str
) -> None:
    client = redis.Redis.from_url(redis_url)
    outbox = redis_keys.outbox_key("g", key_prefix)
    written_initial: list[int] = []
    writer = OutboxWriter(
        client, key_prefix, "r", "i", lambda: written_initial.append(client.xlen(outbox))
    )
    replies = [ControlReply(control_id="pause", ok=True)]
    writer.put(
        StepOutput({"g": OutboxBatch(replica_id="r", incarnation="i", step=1, replies=replies)})
    )
    writer.start()
    writer.close(60)
    assert (written_initial, client.xlen(outbox)) == ([0], 1)


class Counting:
    """A client whose scripts are counted."""

    def __init__(self, client: redis.Redis) -> None:
        self._client, self.scripts = client, 0

    def register_script(self, text: str) -> object:
        script = self._client.register_script(text)

        def run(**arguments: object) -> object:
            self.scripts += 1
            return script(**arguments)  # type: ignore[arg-type]

        return run


def test_steps_that_wait_are_written_together_in_order(redis_url: str, key_prefix: str) -> None:
    """Else a Redis that answers more slowly than the engine steps falls behind for ever."""
    client = redis.Redis.from_url(redis_url)
    inbox = redis_keys.inbox_key("r", key_prefix)
    client.xgroup_create(inbox, protocol.CONSUMER_GROUP, id="0", mkstream=True)
    entries: list[bytes] = [client.xadd(inbox, {"m": step}) for step in range(3)]
    client.xreadgroup(protocol.CONSUMER_GROUP, "c", {inbox: ">"})
    counting = Counting(client)
    writer = OutboxWriter(counting, key_prefix, "r", "i", lambda: None)  # type: ignore[arg-type]
    for step in range(30):
        batches = {
            name: OutboxBatch(
                replica_id="r",
                incarnation="i",
                step=step,
                deltas=[TokenDelta(request_id=name, index=0, token_ids=[step], start=step)],
            )
            for name in (("a", "b") if step % 2 else ("a",))
        }
        writer.put(StepOutput(batches, [entries[step // 10]] if step % 10 == 9 else []))
    writer.start()
    writer.close(10)
    assert counting.scripts == 1
    for name, steps in (("a", range(30)), ("b", range(1, 30, 2))):
        ((_, fields),) = client.xrange(redis_keys.outbox_key(name, key_prefix))
        batch = protocol.decode_outbox(fields[protocol.STREAM_FIELD])
        assert [delta.start for delta in batch.deltas] == list(steps)
        assert batch.step == 29
    assert client.xlen(inbox) == 0
