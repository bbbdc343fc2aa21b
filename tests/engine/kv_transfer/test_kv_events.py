"""KV events: what a subscriber knows of the prefix cache is what is in it."""

from __future__ import annotations

import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.kv_events_config import KVEventsConfig
from engine.core.engine_core import EngineCore
from engine.kv_cache.kv_events import AllBlocksCleared as SentCleared
from engine.kv_cache.kv_events import BlockStored as SentStored
from engine.kv_transfer.redis_event_publisher import RedisEventPublisher
from engine.kv_transfer.zmq_event_publisher import ZmqEventPublisher
from engine.system.redis_client import sync_client
from tests.engine.kv_transfer.test_offloading import make, prompt, run
from tests.waiting import wait_until

Folder = Callable[[str], Path]
DEADLINE_S = 60.0


# What vLLM's examples/online_serving/kv_events_subscriber.py decodes.


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


@pytest.fixture
def folder() -> Iterator[str]:
    """Of sockets, whose names must be short."""
    with tempfile.TemporaryDirectory() as name:
        yield name


def config(folder: str, **settings: Any) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": "kv-events",
        **settings,
    }


class Subscriber:
    """Knows the cached blocks from events alone: (group, hash) of each, and their tokens."""

    def __init__(self, folder: str) -> None:
        self.context = zmq.Context()
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(f"ipc://{folder}/replay")
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(f"ipc://{folder}/events")
        self.events.subscribe("kv-events")
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.num_events = 0
        self.next_number = 0

    def catch_up(self) -> None:
        """Ask for all batches since the last time."""
        self.replay.send_multipart([b"", self.next_number.to_bytes(8, "big")])
        while True:
            assert self.replay.poll(DEADLINE_S * 1000)
            _, number, batch = self.replay.recv_multipart()
            if not batch:
                assert number == b"\xff" * 8
                return
            assert int.from_bytes(number, "big") == self.next_number
            self.next_number += 1
            self.apply(batch)

    def apply(self, batch: bytes) -> None:
        decoded = self.decoder.decode(batch)
        assert time.time() - 600 < decoded.ts <= time.time()
        for event in decoded.events:
            self.num_events += 1
            if isinstance(event, AllBlocksCleared):
                self.tokens.clear()
            elif isinstance(event, BlockRemoved):
                assert event.medium == "GPU"
                for block_hash in event.block_hashes:
                    del self.tokens[block_hash]
            else:
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                parent = event.parent_block_hash
                # A later block may outlive its prefix, so the parent's tokens may be unknown.
                prefix = () if parent is None else self.tokens.get(parent, (-1,))
                for index, block_hash in enumerate(event.block_hashes):
                    prefix += tuple(event.token_ids[index * size : (index + 1) * size])
                    assert block_hash not in self.tokens
                    self.tokens[block_hash] = prefix

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def subscriber(folder: str) -> Iterator[Subscriber]:
    subscriber = Subscriber(folder)
    yield subscriber
    subscriber.close()


def cached(core: EngineCore) -> set[int]:
    """The last 64 bits of the hashes of all cached blocks."""
    keys = core.scheduler.kv.pool._cached
    return {int.from_bytes(key[-8:], "big") for key in keys}


def test_events_lead_to_what_is_cached(
    model_folder: Folder, folder: str, subscriber: Subscriber
) -> None:
    core = make(model_folder("llama"), num_gpu_blocks_override=24, kv_events_config=config(folder))
    rng = random.Random(0)
    for round_ in range(12):
        # Some share a prefix, and all together need more blocks than there are.
        prompts = {
            f"{round_}-{index}": prompt(rng.randrange(3), 48) + prompt(rng.randrange(99), 30)
            for index in range(4)
        }
        run(core, prompts, cache_namespace=str(rng.randrange(2)) * 32)
        # The last step's removals come with the next that is planned.
        core.step()
        wait_until(lambda: subscriber.catch_up() or set(subscriber.tokens) == cached(core))
    assert subscriber.num_events > 50
    assert cached(core)
    assert core.reset_prefix_cache()
    wait_until(lambda: subscriber.catch_up() or not subscriber.tokens)
    core.shutdown()


def test_a_prompts_blocks_come_with_its_tokens_and_each_others_hashes(
    model_folder: Folder, folder: str, subscriber: Subscriber
) -> None:
    core = make(model_folder("llama"), kv_events_config=config(folder))
    tokens = prompt(1, 70)
    outputs = run(core, {"a": tokens})["a"]
    wait_until(lambda: subscriber.catch_up() or len(subscriber.tokens) == 4)
    longest = max(subscriber.tokens.values(), key=len)
    assert longest == tuple((tokens + outputs)[:64])
    core.shutdown()


def test_groups_of_a_hybrid_cache_are_named(model_folder: Folder, folder: str) -> None:
    core = make(
        model_folder("qwen2-window"), num_gpu_blocks_override=24, kv_events_config=config(folder)
    )
    kv = core.scheduler.kv
    assert kv.events is not None
    for seed in range(6):
        run(core, {"a": prompt(seed, 70)})
        assert set(kv.events._stored) == set(kv.pool._cached)
    assert core._event_publisher is not None
    core._event_publisher.close()
    core._event_publisher = None
    assert core.reset_prefix_cache()
    run(core, {"a": prompt(1, 40)})
    cleared, *stored = kv.events.pop_events()
    assert isinstance(cleared, SentCleared)
    assert [
        (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        for event in stored
        if isinstance(event, SentStored)
    ] == [
        (index, "sliding_window" if window else "full_attention", window or None)
        for index, window in enumerate(kv.windows)
    ]


def test_a_subscriber_gets_topic_number_and_batch(
    model_folder: Folder, folder: str, subscriber: Subscriber
) -> None:
    core = make(model_folder("llama"), kv_events_config=config(folder))
    numbers: list[int] = []
    deadline = time.monotonic() + DEADLINE_S
    seed = 0
    # What is published before the subscription has come isn't sent.
    while len(numbers) < 3 and time.monotonic() < deadline:
        seed += 1
        run(core, {"a": prompt(seed, 40)})
        while subscriber.events.poll(100):
            topic, number, batch = subscriber.events.recv_multipart()
            assert topic == b"kv-events"
            assert subscriber.decoder.decode(batch).events
            numbers.append(int.from_bytes(number, "big"))
    assert len(numbers) >= 3
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    core.shutdown()


def test_no_step_waits_for_a_publisher_that_is_slow(folder: str) -> None:
    publisher = ZmqEventPublisher(
        KVEventsConfig.from_mapping(config(folder, max_queue_size=2, buffer_steps=3))
    )
    publisher._queue.send(b"")  # its thread ends
    publisher._thread.join(DEADLINE_S)
    for _ in range(20):
        publisher.publish([SentCleared()])
    assert 0 < publisher.num_lost < 20
    publisher.close()


def test_a_subscriber_that_reads_late_gets_all_past_batches(
    folder: str, subscriber: Subscriber
) -> None:
    count = 5000  # more than a socket holds by ZeroMQ's default
    publisher = ZmqEventPublisher(KVEventsConfig.from_mapping(config(folder, buffer_steps=count)))
    for _ in range(count):
        publisher.publish([SentCleared()])
    wait_until(lambda: len(publisher._buffer) == count)
    subscriber.replay.send_multipart([b"", bytes(8)])
    # The publisher's thread has answered this one when it publishes the next batch.
    wait_until(lambda: subscriber.replay.poll(100))
    publisher.publish([SentCleared()])
    wait_until(lambda: publisher._buffer[-1][0] == count.to_bytes(8, "big"))
    for number in range(count):
        assert subscriber.replay.poll(DEADLINE_S * 1000)
        assert subscriber.replay.recv_multipart()[1] == number.to_bytes(8, "big")
    assert subscriber.replay.poll(DEADLINE_S * 1000)
    assert subscriber.replay.recv_multipart()[1] == b"\xff" * 8
    publisher.close()


def test_what_is_no_number_is_not_answered(folder: str, subscriber: Subscriber) -> None:
    publisher = ZmqEventPublisher(KVEventsConfig.from_mapping(config(folder, buffer_steps=3)))
    for _ in range(5):
        publisher.publish([SentCleared()])
    subscriber.replay.send_multipart([b"", b"12345"])
    subscriber.replay.send_multipart([b"too", b"many", b"frames"])
    subscriber.next_number = 2  # the first two aren't there any more
    wait_until(lambda: subscriber.catch_up() or subscriber.next_number == 5)
    publisher.close()


def test_a_redis_stream_has_the_same_events(
    model_folder: Folder, folder: str, redis_url: str, key_prefix: str
) -> None:
    values = {
        "enable_kv_cache_events": True,
        "publisher": "redis",
        "endpoint": redis_url,
        "topic": key_prefix,
    }
    core = make(model_folder("llama"), num_gpu_blocks_override=12, kv_events_config=values)
    for seed in range(4):  # the later ones push out blocks of the earlier ones
        run(core, {str(seed): prompt(seed, 100)})
    cached_hashes = cached(core)
    core.shutdown()
    with sync_client(redis_url) as client:
        entries = [fields for _, fields in client.xrange(key_prefix)]
        client.delete(key_prefix)
    assert [int(entry[b"number"]) for entry in entries] == list(range(len(entries)))
    assert {entry[b"source"].decode() for entry in entries} == {
        f"{socket.gethostname()}:{os.getpid()}"
    }
    subscriber = Subscriber(folder)
    for entry in entries:
        subscriber.apply(entry[b"batch"])
    subscriber.close()
    assert set(subscriber.tokens) == cached_hashes
    assert any(b"BlockRemoved" in entry[b"batch"] for entry in entries)


def test_without_its_redis_events_are_lost_and_no_step_waits(model_folder: Folder) -> None:
    values = {
        "enable_kv_cache_events": True,
        "publisher": "redis",
        "endpoint": "redis://127.0.0.1:1",
        "topic": "t",
    }
    core = make(model_folder("llama"), kv_events_config=values)
    assert run(core, {"a": prompt(1, 70)})["a"]
    publisher = core._event_publisher
    assert isinstance(publisher, RedisEventPublisher)
    wait_until(lambda: publisher.num_lost)
    core.shutdown()


@pytest.mark.parametrize(
    "values",
    [
        {"enable_kv_cache_events": 1},
        {"other": 1},
        {"publisher": "kafka"},
        {"endpoint": "5557"},
        {"replay_endpoint": 5},
        {"buffer_steps": 0},
        {"hwm": True},
        {"hwm": 2**31},
        {"topic": None},
        {"publisher": "redis", "endpoint": "redis://localhost"},
        {"publisher": "redis", "topic": "events"},
        {
            "publisher": "redis",
            "endpoint": "redis://x",
            "topic": "t",
            "replay_endpoint": "redis://x",
        },
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(model="m", kv_events_config=values)
    assert refusal.value.param == "kv_events_config"


def test_events_need_a_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        EngineConfig(
            model="m",
            kv_events_config={"enable_kv_cache_events": True},
            enable_prefix_caching=False,
        )


def test_an_endpoint_that_cannot_be_bound_is_refused() -> None:
    values = {"enable_kv_cache_events": True, "endpoint": "ipc:///no/such/folder/events"}
    with pytest.raises(ConfigError, match="endpoint") as refusal:
        ZmqEventPublisher(KVEventsConfig.from_mapping(values))
    assert refusal.value.param == "kv_events_config"
