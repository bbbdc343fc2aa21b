"""Blocks in Redis and S3: right or not at all, within the capacity, and never waited for long."""

from __future__ import annotations

import random
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.core.engine_core import EngineCore
from engine.kv_transfer.remote_tier import RemoteTier, make_store, record_bytes
from engine.kv_transfer.s3_store import S3Store
from tests.engine.kv_transfer.remote_stores import (
    Records,
    RedisRecords,
    S3Records,
    running_s3,
    running_store,
)
from tests.engine.kv_transfer.test_disk_tier import block, key
from tests.engine.kv_transfer.test_offloading import connector_of, make, prompt, run

Folder = Callable[[str], Path]
BLOCK = 1000
CAPACITY = 20 * record_bytes(BLOCK)


@pytest.fixture(scope="module", params=["redis", "s3"])
def server(request: pytest.FixtureRequest) -> Iterator[Records]:
    with (
        tempfile.TemporaryDirectory() as folder,
        running_store(request.param, Path(folder)) as local_store,
    ):
        yield local_store


@pytest.fixture
def records(server: Records) -> Records:
    server.clear()
    return server


@pytest.fixture
def make_tier(records: Records) -> Iterator[Callable[..., RemoteTier]]:
    tiers: list[RemoteTier] = []

    def make_one(capacity: int = CAPACITY, url: str = records.url) -> RemoteTier:
        tiers.append(RemoteTier(make_store(url, capacity, BLOCK), capacity, BLOCK))
        return tiers[-1]

    yield make_one
    for tier in tiers:
        tier.close()


MakeTier = Callable[..., RemoteTier]


def small(seed: int) -> np.ndarray:
    return block(seed)[:BLOCK]


def is_intact(tier: RemoteTier, seed: int, namespace: str = "n") -> bool:
    """Whether a block is there; it must not be another."""
    payload = tier.read(key(seed), namespace)
    assert payload is None or payload.tobytes() == small(seed).tobytes()
    return payload is not None


def test_another_replica_reads_what_one_has_written(records: Records, make_tier: MakeTier) -> None:
    tier, other = make_tier(), make_tier()
    assert all(tier.write(key(seed), small(seed), "n") for seed in range(5))
    assert all(is_intact(other, seed) for seed in range(5))
    assert not is_intact(other, 6)
    assert not tier.write(key(0), small(0), "n")
    sequence = list(other.read_sequence([key(seed) for seed in (3, 1, 2, 9, 4)], "n"))
    assert [payload.tobytes() for payload in sequence] == [small(s).tobytes() for s in (3, 1, 2)]
    assert not tier.failures + other.failures
    assert len(records.names()) == 5


def test_nothing_of_a_block_can_be_read_in_the_store(records: Records, make_tier: MakeTier) -> None:
    text = np.frombuffer((b"the tenant's secret prompt " * 40)[:BLOCK], np.uint8)
    make_tier().write(key(0), text, "n")
    (name,) = records.names()
    assert b"secret prompt" not in records.get(name)


def test_a_capacity_holds_at_every_moment(records: Records, make_tier: MakeTier) -> None:
    tiers = [make_tier(), make_tier()]
    tier = tiers[0]
    for seed in range(45):
        assert tier.write(key(seed), small(seed), "n")
        size = len(records.names()) * record_bytes(BLOCK)
        assert size <= CAPACITY
        tier.refresh()
        assert tier.used_bytes == size
    assert is_intact(tiers[1], 44)


def test_tenants_share_a_redis_equally_in_every_sample(tmp_path: Path) -> None:
    """Each is within its share, or the others' shares aren't used; the capacity always holds."""
    random_ = random.Random(1)
    with running_store("redis", tmp_path) as records:
        assert isinstance(records, RedisRecords)
        tiers = [
            RemoteTier(make_store(records.url, CAPACITY, BLOCK), CAPACITY, BLOCK) for _ in range(2)
        ]
        for seed in range(4):
            assert tiers[0].write(key(seed), small(seed), "n", "quiet")
        for seed in range(100, 400):
            tenant = random_.choice(("loud", "louder"))
            assert tiers[seed % 2].write(key(seed), small(seed), "n", tenant)
            sizes = sorted(size for _, size in records.client.zrange(
                "quire:kv:owners", 0, -1, withscores=True))  # fmt: skip
            assert sum(sizes) == int(records.client.get("quire:kv:bytes")) <= CAPACITY
            assert sum(sizes) == len(records.names()) * record_bytes(BLOCK)
            assert sizes[0] == 4 * record_bytes(BLOCK) or seed < 110
        assert sizes == [4 * record_bytes(BLOCK), 8 * record_bytes(BLOCK), 8 * record_bytes(BLOCK)]
        assert all(is_intact(tiers[1], seed) for seed in range(4))
        assert len(dict(tiers[0]._store.records())) == 20
        assert tiers[0]._store.clear() == 20
        assert not records.names()
        assert int(records.client.get("quire:kv:bytes")) == 0
        for tier in tiers:
            tier.close()


def test_tenants_share_a_bucket_equally() -> None:
    random_ = random.Random(1)
    with running_s3():
        records = S3Records()
        records.clear()
        tier = RemoteTier(make_store(records.url, CAPACITY, BLOCK), CAPACITY, BLOCK)
        for seed in range(4):
            assert tier.write(key(seed), small(seed), "n", "quiet")
        for seed in range(100, 160):
            tenant = random_.choice(("loud", "louder"))
            assert tier.write(key(seed), small(seed), "n", tenant)
            assert len(records.names()) <= 20
        owners = Counter(name.rsplit("/")[-2] for name in records.names())
        quiet, fewer, more = sorted(owners.values())
        assert quiet == 4
        assert more - fewer <= 2
        assert all(tier.read(key(seed), "n", "quiet") is not None for seed in range(4))
        assert tier.read(key(0), "n", "loud") is None
        assert len(dict(tier._store.records())) == len(records.names())
        tier.close()


def test_a_capacity_holds_where_records_may_not_be_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_s3():
        records = S3Records()
        records.clear()
        store = make_store(records.url, CAPACITY, BLOCK)
        assert isinstance(store, S3Store)
        refusal = {"Errors": [{"Code": "AccessDenied"}]}
        monkeypatch.setattr(store._client, "delete_objects", lambda **kwargs: refusal)
        tier = RemoteTier(store, CAPACITY, BLOCK)
        for seed in range(30):
            tier._paused_until = 0.0
            tier.write(key(seed), small(seed), "n")
        assert 15 < len(records.names()) <= 20
        assert tier.failures == {"write_error": 30 - len(records.names())}
        tier.close()


def test_a_block_that_was_evicted_is_written_again(records: Records, make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.write(key(0), small(0), "n")
    records.clear()
    assert key(0) in tier
    tier.refresh()
    assert not is_intact(tier, 0)
    assert key(0) not in tier


def test_who_only_writes_writes_evicted_blocks_again(
    records: Records, make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    assert tier.write(key(0), small(0), "n")
    records.clear()
    assert not tier.write(key(0), small(0), "n")
    monkeypatch.setattr("engine.kv_transfer.remote_tier.STORED_S", 0.0)
    assert tier.write(key(0), small(0), "n")
    assert is_intact(tier, 0)


def test_another_namespace_or_secret_opens_nothing(records: Records, make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.write(key(0), small(0), "one")
    assert not is_intact(tier, 0, "two")
    assert tier.failures == {"authentication": 1}
    records.set_secret(b"x" * 32)
    other = make_tier()
    assert not is_intact(other, 0, "one")
    # A bucket's names are others, too.
    assert other.failures == ({} if isinstance(records, S3Records) else {"authentication": 1})


def test_a_short_secret_is_not_used(records: Records, make_tier: MakeTier) -> None:
    records.set_secret(b"")
    tier = make_tier()
    assert not tier.write(key(0), small(0), "n")
    assert tier.failures == {"write_error": 1}
    assert records.names() == []


def inject_faults(records: Records, make_tier: MakeTier, count: int, seed: int) -> None:
    """Any fault of a record gives the block that was written, or none and a count."""
    rng = random.Random(seed)
    tier = make_tier()
    pristine: dict[str, bytes] = {}
    for index in range(8):
        initial_names = set(records.names())
        assert tier.write(key(index), small(index), str(index % 2))
        (name,) = set(records.names()) - initial_names
        pristine[name] = records.get(name)
    names = list(pristine)
    num_faults = 0
    for _ in range(count):
        index = rng.randrange(8)
        name, other = names[index], names[rng.randrange(8)]
        record = bytearray(pristine[name])
        kind = rng.randrange(5)
        if kind == 0:
            record[rng.randrange(len(record) - 12 - BLOCK - 16)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            record[rng.randrange(64, len(record))] ^= 1 << rng.randrange(8)
        elif kind == 2:
            record = record[: rng.randrange(len(record))]
        elif kind == 3:
            record = bytearray(pristine[other])
        else:
            record += bytes(rng.randrange(1, 99))
        records.set(name, bytes(record))
        if bytes(record) != pristine[name]:
            num_faults += 1
        is_intact(tier, index, str(index % 2))
        records.set(name, pristine[name])
        assert is_intact(tier, index, str(index % 2))
    counted = tier.failures
    assert set(counted) <= {"authentication", "header", "truncated"}
    # A flipped bit in what a header doesn't use changes nothing.
    assert 0.7 * num_faults <= counted.total() <= num_faults


def test_of_100_faults_none_gives_other_bytes(records: Records, make_tier: MakeTier) -> None:
    inject_faults(records, make_tier, 100, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a server of S3 in Python
@pytest.mark.parametrize("seed", range(2, 6))
def test_of_10000_faults_none_gives_other_bytes(
    records: Records, make_tier: MakeTier, seed: int
) -> None:
    """In four parts."""
    inject_faults(records, make_tier, 2_500, seed)


@pytest.mark.parametrize("scheme", ["redis", "s3"])
def test_a_store_that_does_not_answer_is_asked_once_and_then_left_alone(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"engine.kv_transfer.{scheme}_store.TIMEOUT_S", 0.1)
    monkeypatch.setattr("engine.kv_transfer.remote_tier._PAUSE_S", 600.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        url = {"redis": f"redis://127.0.0.1:{port}", "s3": "s3://bucket"}[scheme]
        tier = RemoteTier(make_store(url, CAPACITY, BLOCK), CAPACITY, BLOCK)
        assert tier.may_contain(key(0))
        assert tier.read(key(0), "n") is None
        assert tier.is_paused
        assert not tier.may_contain(key(0))
        assert tier.failures == {"read_error": 1}
        for _ in range(100):
            assert tier.read(key(0), "n") is None
            assert not tier.write(key(0), small(0), "n")
        assert tier.measure_read() == 0.0
        assert tier.failures == {"read_error": 1}
        tier._paused_until = 0.0
        assert not tier.write(key(0), small(0), "n")
        assert tier.failures == {"read_error": 1, "write_error": 1}
        tier.close()


def with_store(folder: Path, url: str, **settings: Any) -> EngineCore:
    return make(folder, kv_offloading_size=0.01, kv_offloading_backend=url, **settings)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_replica_loads_what_another_has_computed(
    model_folder: Folder, records: Records, async_scheduling: bool
) -> None:
    folder, prompts = model_folder("llama"), {"a": prompt(1, 70), "b": prompt(2, 100)}
    core = with_store(folder, records.url, async_scheduling=async_scheduling)
    expected = run(core, prompts, cache_namespace="1" * 32)
    core.shutdown()
    other = with_store(folder, records.url, async_scheduling=async_scheduling)
    assert run(other, prompts, cache_namespace="2" * 32) == expected
    assert connector_of(other).num_matched_tokens == 0
    other.shutdown()
    third = with_store(folder, records.url, async_scheduling=async_scheduling)
    assert run(third, prompts, cache_namespace="1" * 32) == expected
    assert connector_of(third).num_matched_tokens == 64 + 96
    stats = third.snapshot()
    assert set(stats.kv_tier_bytes) == {"host", "remote"}
    assert not stats.kv_tier_failures_total
    third.shutdown()


def test_after_faults_of_the_store_tokens_are_right(model_folder: Folder, records: Records) -> None:
    folder, prompts = model_folder("llama"), {str(seed): prompt(seed, 90) for seed in range(3)}
    core = with_store(folder, records.url)
    expected = run(core, prompts)
    core.shutdown()
    rng = random.Random(5)
    for name in rng.sample(records.names(), 6):
        data = bytearray(records.get(name))
        data[rng.randrange(100, len(data))] ^= 1 << rng.randrange(8)
        records.set(name, bytes(data))
    core = with_store(folder, records.url)
    assert run(core, prompts) == expected
    assert connector_of(core).num_matched_tokens < 3 * 80
    assert core.snapshot().kv_tier_failures_total["authentication"] >= 1
    core.shutdown()


def test_with_a_dead_store_a_replica_starts_and_computes(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {"a": prompt(1, 70)}
    expected = run(make(model_folder("llama")), prompts)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it doesn't listen, and nobody else can
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}"
        core = with_store(model_folder("llama"), url)
        assert run(core, prompts) == expected
        failures = core.snapshot().kv_tier_failures_total
        assert failures["read_error"] + failures.get("write_error", 0) >= 1
        core.shutdown()


def test_several_threads_read_and_write_one_tier(records: Records, make_tier: MakeTier) -> None:
    tier = make_tier()
    errors: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for seed in range(start, start + 5):
                tier.write(key(seed), small(seed), "n")
                assert is_intact(tier, seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(5 * index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("http://host/kv", 1),
        ("s3://", 1),
        ("s3://bucket?x=1", 1),
        ("redis://host:port", 1),
        ("redis://127.0.0.1:1", 1e-6),
    ],
)
def test_a_store_that_cannot_be_used_is_refused(
    backend: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with pytest.raises(ConfigError) as refusal:
        make_tier_of(backend, size)
    assert refusal.value.param == ("kv_offloading_size" if size < 1 else "kv_offloading_backend")


def make_tier_of(backend: str, size: float) -> None:
    config = EngineConfig(model="m", kv_offloading_backend=backend, kv_offloading_size=size)
    make_store(config.kv_offloading_backend, int(size * 2**30), 2000)
