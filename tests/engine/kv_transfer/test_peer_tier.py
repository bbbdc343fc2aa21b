"""Blocks that a replica reads from another one's memory: right or not at all, never waited for."""

from __future__ import annotations

import functools
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.core.engine_core import EngineCore
from engine.kv_transfer import peer_tier
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.peer_tier import PeerTier
from tests.engine.kv_transfer.test_disk_tier import block, key
from tests.engine.kv_transfer.test_offloading import connector_of, make, message, prompt, run
from tests.waiting import wait_until

Folder = Callable[[str], Path]
BLOCK = 1000
RECORD = BLOCK + 28
CAPACITY = 20 * RECORD
URL = "tcp://127.0.0.1:0"


def small(seed: int) -> np.ndarray:
    return block(seed)[:BLOCK]


@contextmanager
def peer(capacity: int = CAPACITY, *, serves: bool = True) -> Iterator[PeerTier]:
    tier = PeerTier(URL, capacity, BLOCK, serves=serves)
    try:
        yield tier
    finally:
        tier.close()


@pytest.fixture
def producer() -> Iterator[PeerTier]:
    with peer() as tier:
        yield tier


@pytest.fixture
def consumer() -> Iterator[PeerTier]:
    with peer(serves=False) as tier:
        yield tier


@pytest.fixture
def patient_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine isn't a peer that has died."""
    monkeypatch.setattr(peer_tier, "LEASE_S", 60.0)


def read(tier: PeerTier, seeds: list[int], source: str, namespace: str = "n") -> int:
    """The number of the first blocks that came; they must be the right ones."""
    payloads = list(tier.read_sequence([key(seed) for seed in seeds], namespace, source))
    for seed, payload in zip(seeds, payloads, strict=False):
        assert payload.tobytes() == small(seed).tobytes()
    return len(payloads)


@pytest.mark.usefixtures("patient_peers")
def test_a_peer_serves_blocks_up_to_the_first_that_it_has_not(
    producer: PeerTier, consumer: PeerTier
) -> None:
    assert all(producer.write(key(seed), small(seed), "n") for seed in range(5))
    assert read(consumer, [3, 1, 2, 9, 4], producer.address) == 3
    assert read(producer, [4, 0], "") == 2
    assert read(consumer, [0], producer.address, namespace="other") == 0
    assert consumer.failures == {"authentication": 1}
    assert not producer.failures
    assert consumer.address == ""


@pytest.mark.usefixtures("patient_peers")
def test_nothing_of_a_block_can_be_read_on_the_wire(producer: PeerTier) -> None:
    text = np.frombuffer((b"the tenant's secret prompt " * 40)[:BLOCK], np.uint8)
    producer.write(key(0), text, "n")
    (record,) = ask(producer.address, [key(0)])
    assert len(record) == RECORD
    assert b"secret prompt" not in record


def ask(address: str, keys: list[bytes]) -> list[bytes]:
    """What a peer sends."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(struct.pack("<I", len(keys)) + b"".join(keys))
        with connection.makefile("rb") as answer:
            received = answer.read()
    return [received[start : start + RECORD] for start in range(0, len(received), RECORD)]


@pytest.mark.usefixtures("patient_peers")
def test_leased_blocks_stay_until_they_are_sent(producer: PeerTier, consumer: PeerTier) -> None:
    leased = list(range(6))
    for seed in leased:
        producer.write(key(seed), small(seed), "n", "a")
    producer.lease([key(seed) for seed in leased])
    for seed in range(100, 140):
        producer.write(key(seed), small(seed), "n", "b")
        assert producer.used_bytes <= CAPACITY
    assert read(consumer, leased, producer.address) == len(leased)
    wait_until(lambda: not producer._records._leases)
    for seed in range(200, 240):
        producer.write(key(seed), small(seed), "n", "a")
    assert not any(key(seed) in producer for seed in leased)


@pytest.mark.usefixtures("patient_peers")
def test_who_asks_too_early_ends_no_lease(producer: PeerTier, consumer: PeerTier) -> None:
    keys = [key(seed) for seed in range(3)]
    producer.write(keys[0], small(0), "n", "a")
    assert read(consumer, [0, 1, 2], producer.address) == 1
    for seed in (1, 2):
        producer.write(keys[seed], small(seed), "n", "a")
    for seed in range(100, 140):
        producer.write(key(seed), small(seed), "n", "a")
    assert read(consumer, [1, 2], producer.address) == 2


def test_leased_blocks_are_free_once_the_lease_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tier = HostTier(4 * BLOCK)
    tier.lease([key(2)], 2.0)
    tier.put([(key(seed), small(seed)) for seed in range(4)], "a")
    tier.lease([key(0), key(1), key(3)], 2.0)
    tier.put([(key(9), small(9))], "b")  # all others are leased
    assert [key(seed) in tier for seed in (0, 1, 2, 3, 9)] == [True] * 4 + [False]
    assert (tier.used_bytes, tier.tenant_bytes("a")) == (4 * BLOCK, 4 * BLOCK)
    now += 2.1
    tier.put([(key(9), small(9))], "b")
    assert key(9) in tier
    assert tier.used_bytes == 4 * BLOCK
    tier.clear()
    assert (tier.used_bytes, tier.tenant_bytes("a")) == (0, 0)


def test_leases_of_blocks_that_never_come_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tier = HostTier(4 * BLOCK)
    for start in range(0, 1000, 10):
        tier.lease([key(seed) for seed in range(start, start + 10)], 2.0)
        now += 1.0
    assert len(tier._leases) <= 20


def test_a_reader_that_died_keeps_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks, and never takes what it asked for."""
    monkeypatch.setattr(peer_tier, "LEASE_S", 0.2)
    size = 2**21  # more than the sockets' buffers take
    tier = PeerTier(URL, 8 * size, size, serves=True)
    keys = [key(seed) for seed in range(6)]
    for one_key in keys:
        tier.write(one_key, np.zeros(size, np.uint8), "n")
    host, _, port = tier.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(struct.pack("<I", len(keys)) + b"".join(keys))
        wait_until(lambda: tier.failures["write_error"])
    wait_until(lambda: not any(key in tier._records._leases for key in keys))
    tier.close()


def test_a_peer_that_is_gone_or_silent_makes_a_prefix_shorter(
    consumer: PeerTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peer() as gone:
        address = gone.address
    assert read(consumer, [1], address) == 0
    monkeypatch.setattr(peer_tier, "LEASE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert read(consumer, [1], f"tcp://127.0.0.1:{port}") == 0
    assert consumer.failures == {"read_error": 2}


@pytest.mark.parametrize(
    "url", ["tcp://", "tcp://127.0.0.1", "tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://127.0.0.1:x",
            "tcp://127.0.0.1:0/path", "tcp://203.0.113.1:0"]
)  # fmt: skip
def test_a_url_that_cannot_be_listened_at_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        PeerTier(url, CAPACITY, BLOCK, serves=True)
    assert refusal.value.param == "kv_offloading_backend"


@pytest.mark.usefixtures("patient_peers")
def test_strangers_who_ask_too_much_or_too_little_are_sent_away(
    producer: PeerTier, consumer: PeerTier
) -> None:
    producer.write(key(0), small(0), "n")
    host, _, port = producer.address.removeprefix("tcp://").rpartition(":")
    for junk in (b"", b"GET", struct.pack("<I", 2**32 - 1), struct.pack("<I", 2) + b"k" * 33):
        with socket.create_connection((host, int(port)), 60) as connection:
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    assert read(consumer, [0], producer.address) == 1


class Proxy:
    """Passes a peer's answers on, damaged."""

    def __init__(self, damage: Callable[[bytes], bytes]) -> None:
        self.damage = damage
        self.source = ""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as request:
                count = struct.unpack("<I", request.read(4))[0]
                keys = [request.read(32) for _ in range(count)]
                connection.sendall(self.damage(b"".join(ask(self.source, keys))))

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def damaged(kind: str, index: int, other: int, answer: bytes) -> bytes:
    """An answer of four blocks; the one with the byte at `index` is damaged, or is the `other`."""
    records = [answer[start : start + RECORD] for start in range(0, len(answer), RECORD)]
    bad = index // RECORD
    if kind == "flip":
        flipped = bytearray(answer)
        flipped[index] ^= 1 << index % 8
        return bytes(flipped)
    if kind == "exchange":
        records[bad], records[other] = records[other], records[bad]
        return b"".join(records)
    if kind == "truncate":
        return answer[:index]
    if kind == "insert":
        return answer[:index] + b"x" + answer[index:]
    return answer[: bad * RECORD] + answer if kind == "repeat" and bad else answer


def faults(count: int, seed: int) -> None:
    """Blocks that are damaged on their way, of a peer that dies or evicts, or another tenant's:
    each is the right one or doesn't come.
    """
    random_ = random.Random(seed)
    kinds = ("flip", "exchange", "truncate", "insert", "repeat", "evict", "namespace", "memory")
    with peer() as producer, peer(serves=False) as consumer:
        seeds = list(range(4))
        proxy = Proxy(lambda answer: answer)
        proxy.source = producer.address
        for _ in range(count):
            kind = random_.choice(kinds)
            for one in seeds:
                producer.write(key(one), small(one), "n")
            position = random_.randrange(4 * RECORD)
            bad = position // RECORD
            other = random_.choice([index for index in seeds if index != bad])

            proxy.damage = functools.partial(damaged, kind, position, other)
            namespace = "n"
            if kind == "evict":
                producer._records._remove(key(bad))
            elif kind == "namespace":
                namespace = "m"
            elif kind == "memory":
                changed = producer._records._blocks[key(bad)][0].copy()
                changed[position % RECORD] ^= np.uint8(1)
                checksum = producer._records._blocks[key(bad)][1]
                producer._records._blocks[key(bad)] = changed, checksum
            num_read = read(consumer, seeds, proxy.address, namespace)
            first_bad = {"exchange": min(bad, other), "namespace": 0, "repeat": bad or 4}
            assert num_read == first_bad.get(kind, bad), kind
        proxy.close()
        assert sum((consumer.failures + producer.failures).values()) > count / 2


@pytest.mark.usefixtures("patient_peers")
def test_no_fault_of_a_hand_over_gives_a_wrong_block() -> None:
    faults(100, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("patient_peers")
def test_none_of_10_000_faults_of_a_hand_over_gives_a_wrong_block() -> None:
    faults(10_000, 2)


def engine(folder: Path, role: str, **settings: Any) -> EngineCore:
    return make(
        folder,
        kv_offloading_size=0.01,
        kv_offloading_backend=URL,
        kv_transfer_config={"kv_role": role},
        **settings,
    )


@pytest.mark.usefixtures("patient_peers")
def test_a_decode_replica_loads_a_prompt_from_the_prefill_replica(model_folder: Folder) -> None:
    folder, one, two = model_folder("llama"), {"a": prompt(1, 100)}, {"b": prompt(2, 100)}
    expected = run(make(folder), one)
    producer, consumer = engine(folder, "kv_producer"), engine(folder, "kv_consumer")
    theirs, ours = producer.kv_handover, consumer.kv_handover
    assert theirs is not None
    assert ours is not None
    assert theirs.key_space == ours.key_space
    assert theirs.address.startswith("tcp://127.0.0.1:")
    assert ours.address == ""
    run(producer, one)
    connector_of(producer).wait_until_saved(60)
    storage = connector_of(producer).storage
    assert storage is not None
    assert storage.tier.used_bytes
    tokens = run(consumer, one, prefilled=True, kv_peer=theirs.address)
    assert tokens == expected
    assert connector_of(consumer).num_matched_tokens == 96
    producer.shutdown()
    assert run(consumer, two, prefilled=True, kv_peer=theirs.address) == run(make(folder), two)
    assert connector_of(consumer).num_matched_tokens == 96
    consumer.shutdown()


@pytest.mark.usefixtures("patient_peers")
def test_blocks_travel_while_the_rest_of_the_prompt_is_computed(model_folder: Folder) -> None:
    folder, token_ids = model_folder("llama"), prompt(1, 200)
    expected = run(make(folder), {"a": token_ids})
    producer = engine(folder, "kv_producer", max_num_batched_tokens=32)
    consumer = engine(folder, "kv_consumer")
    handover = producer.kv_handover
    assert handover is not None
    host = connector_of(consumer).host
    consumer.follow_prefill(message("a", token_ids, kv_peer=handover.address))
    producer.add_request(message("a", token_ids, max_tokens=1))
    for num_steps in range(1, 7):
        producer.step()
        wait_until(lambda: len(host) >= 2 * num_steps - 2)  # noqa: B023 - called at once
        assert producer.has_work
    while producer.has_work:
        producer.step()
    connector_of(producer).wait_until_saved(60)
    wait_until(lambda: len(host) == 12)
    producer.shutdown()
    tokens = run(consumer, {"a": token_ids}, prefilled=True, kv_peer=handover.address)
    assert tokens == expected
    assert connector_of(consumer).num_matched_tokens == 192
    assert not consumer.snapshot().kv_tier_failures_total
    consumer.shutdown()


def test_a_prefill_replica_that_dies_or_computes_nothing_is_followed_no_longer(
    consumer: PeerTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key(seed) for seed in range(3)]
    with peer() as producer:
        address = producer.address
        producer.write(keys[0], small(0), "n")
        monkeypatch.setattr(peer_tier, "READ_TIMEOUT_S", 0.1)
        assert len(list(consumer.follow_sequence(keys, "n", address, lambda: True))) == 1
        assert not consumer.failures
        monkeypatch.setattr(peer_tier, "READ_TIMEOUT_S", 60.0)
        assert len(list(consumer.follow_sequence(keys, "n", address, lambda: False))) == 0
        following = consumer.follow_sequence(keys, "n", address, lambda: True)
        next(following)
    assert list(following) == []
    assert consumer.failures == {"read_error": 1}


def test_settings_take_an_address() -> None:
    config = EngineConfig(model="m", kv_offloading_size=1, kv_offloading_backend=URL)
    assert config.kv_offloading_backend == URL
