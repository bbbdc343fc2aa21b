"""FAULT 48: a replica that was replaced while it stood still writes nothing when it wakes up."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import AbortRequest, Heartbeat, ModelInfo, OutboxBatch
from engine.serving import inbox as fence_module
from engine.serving.heartbeat import HeartbeatWriter
from engine.serving.inbox import InboxReader, IncarnationFence, IncarnationReplaced
from engine.serving.outbox import OutboxWriter, StepOutput

REPLICA = "r"


class Sleeper:
    """What a replica's process writes with: heartbeat, outbox and inbox of one incarnation."""

    def __init__(self, client: redis.Redis, prefix: str, incarnation: str) -> None:
        self.incarnation = incarnation
        self.heart = HeartbeatWriter(client, prefix, self.heartbeat)
        self.writer = OutboxWriter(client, prefix, REPLICA, incarnation, lambda: None)
        inbox = redis_keys.inbox_key(REPLICA, prefix)
        self.fence = IncarnationFence(client, prefix, REPLICA, incarnation)
        self.reader = InboxReader(client, inbox, incarnation, self.fence)

    def heartbeat(self) -> Heartbeat:
        model = ModelInfo(name="m", path="", max_model_len=1, vocab_size=1, dtype="float32")
        return Heartbeat(
            replica_id=REPLICA,
            incarnation=self.incarnation,
            state="ready",
            model=model,
            at=time.time(),
            progress_at=time.time(),
        )

    def batch(self) -> StepOutput:
        return StepOutput(
            {"gateway": OutboxBatch(replica_id=REPLICA, incarnation=self.incarnation, step=1)}
        )


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[BaseException | None]:
    """What threads died of: in a replica's process that ends it."""
    seen: queue.Queue[BaseException | None] = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.put(args.exc_value))
    return seen


def test_fault_48_what_a_replaced_replica_still_has_is_dropped(
    client: redis.Redis, key_prefix: str, ends: queue.Queue[BaseException | None]
) -> None:
    old, new = Sleeper(client, key_prefix, "old"), Sleeper(client, key_prefix, "new")
    old.heart.write_now()
    new.heart.write_now()
    new.writer.start()
    new.writer.put(new.batch())
    old.writer.start()
    old.writer.put(old.batch())
    assert isinstance(ends.get(timeout=60), IncarnationReplaced)
    new.writer.close(30)
    entries = client.xrange(redis_keys.outbox_key("gateway", key_prefix))
    written = [protocol.decode_outbox(fields[protocol.STREAM_FIELD]) for _, fields in entries]
    assert [batch.incarnation for batch in written] == ["new"]


def test_fault_48_a_replaced_replica_can_t_write_its_heartbeat_over_its_successors(
    client: redis.Redis, key_prefix: str
) -> None:
    old, new = Sleeper(client, key_prefix, "old"), Sleeper(client, key_prefix, "new")
    old.heart.write_now()
    new.heart.write_now()
    with pytest.raises(IncarnationReplaced, match="Another process serves as r by now"):
        old.heart.write_now()
    new.heart.write_now()
    data = client.get(redis_keys.replica_key(REPLICA, key_prefix))
    assert protocol.decode_heartbeat(data).incarnation == "new"


def test_fault_48_a_replaced_replica_takes_nothing_from_the_inbox(
    client: redis.Redis,
    key_prefix: str,
    ends: queue.Queue[BaseException | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fence_module, "_DOUBT_AFTER_S", -1.0)  # as if it had slept
    old, new = Sleeper(client, key_prefix, "old"), Sleeper(client, key_prefix, "new")
    old.heart.write_now()
    new.heart.write_now()
    message = protocol.encode(AbortRequest(request_id="x"))
    client.xadd(redis_keys.inbox_key(REPLICA, key_prefix), {protocol.STREAM_FIELD: message})
    old.reader.start()
    assert isinstance(ends.get(timeout=60), IncarnationReplaced)
    assert old.reader.messages.empty()
    new.reader.start()
    assert isinstance(new.reader.messages.get(timeout=60)[1], AbortRequest)
    new.reader.stop()


def test_a_replica_whose_redis_lost_everything_takes_its_id_again(
    client: redis.Redis, key_prefix: str
) -> None:
    replica = Sleeper(client, key_prefix, "only")
    replica.heart.write_now()
    client.delete(redis_keys.owner_key(REPLICA, key_prefix))
    replica.heart.write_now()
    assert client.get(redis_keys.owner_key(REPLICA, key_prefix)) == b"only"
