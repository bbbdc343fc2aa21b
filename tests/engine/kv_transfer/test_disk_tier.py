"""KV blocks in a folder: whole, authentic, within the budget, and there after a restart."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.contract.errors import ConfigError
from engine.kv_transfer import disk_tier
from engine.kv_transfer.disk_tier import NUM_SEGMENTS, SUFFIX, DiskTier
from engine.kv_transfer.storage_tier import HEADER, TAG_BYTES

BLOCK = 1000
#: Each segment holds three blocks.
CAPACITY = NUM_SEGMENTS * 3300


def block(seed: int) -> np.ndarray:
    return np.frombuffer(random.Random(seed).randbytes(BLOCK), dtype=np.uint8)


def key(seed: int) -> bytes:
    return random.Random(f"key {seed}").randbytes(32)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in segments(folder))


def is_intact(tier: DiskTier, seed: int, namespace: str = "n") -> bool:
    payload = tier.read(key(seed), namespace)
    if payload is None:
        return False
    assert payload.tobytes() == block(seed).tobytes(), "a wrong block"
    return True


def test_blocks_are_read_as_they_were_written_also_by_the_next_process(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", CAPACITY, BLOCK)
    assert all(tier.write(key(seed), block(seed), "n") for seed in range(10))
    assert all(is_intact(tier, seed) for seed in range(10))
    tier.close()
    reopened = DiskTier(tmp_path / "kv", CAPACITY, BLOCK)
    assert len(reopened) == 10
    assert all(is_intact(reopened, seed) for seed in range(10))
    assert reopened.write(key(10), block(10), "n")
    assert len(segments(tmp_path / "kv")) == 4, "the last segment is gone on with"
    assert not reopened.failures


def test_the_budget_holds_after_every_write_and_old_segments_go_first(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, CAPACITY, BLOCK)
    for seed in range(500):
        assert tier.write(key(seed), block(seed), "n")
        assert bytes_on_disk(tmp_path) <= CAPACITY
        if seed % 10 == 9:
            assert is_intact(tier, 1), "its segment is in use"
    assert is_intact(tier, 499)
    assert not is_intact(tier, 50)
    assert len(tier) <= 3 * NUM_SEGMENTS


def test_a_clock_that_jumps_loses_old_blocks_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_ = random.Random(7)
    monkeypatch.setattr(disk_tier.time, "time_ns", lambda: random_.randrange(2**62))
    tier = DiskTier(tmp_path, CAPACITY, BLOCK)
    for number in range(450):
        tier.write(key(number), block(number), "n")
        assert is_intact(tier, number)
        assert bytes_on_disk(tmp_path) <= CAPACITY
    reopened = DiskTier(tmp_path, CAPACITY, BLOCK)
    for store in (tier, reopened):
        num_read = sum(is_intact(store, number) for number in range(450))
        assert num_read == len(list(store.keys())) > 2 * NUM_SEGMENTS
        assert not store.failures


def test_a_tenant_cannot_push_out_of_a_folder_what_is_within_another_ones_share(
    tmp_path: Path,
) -> None:
    tiers = [DiskTier(tmp_path, CAPACITY, BLOCK) for _ in range(2)]
    for seed in range(30):
        assert tiers[0].write(key(seed), block(seed), "n", "small")
    for seed in range(1000, 1300):
        tier = tiers[seed % 2]
        assert tier.write(key(seed), block(seed), "n", "large")
        assert bytes_on_disk(tmp_path) <= CAPACITY
    assert all(is_intact(tiers[0], seed) for seed in range(30))
    assert is_intact(tiers[1], 1299)
    # The next process knows whose the bytes are.
    for tier in tiers:
        tier.close()
    reopened = DiskTier(tmp_path, CAPACITY, BLOCK)
    for seed in range(2000, 2100):
        assert reopened.write(key(seed), block(seed), "n", "large")
    assert all(is_intact(reopened, seed) for seed in range(30))


def test_tenants_keep_their_shares_of_a_folder_with_eight_writers(tmp_path: Path) -> None:
    """In every sample, and the budget holds."""
    random_ = random.Random(1)
    tiers = [DiskTier(tmp_path, CAPACITY, BLOCK) for _ in range(8)]
    num_blocks = CAPACITY // (HEADER.size + BLOCK + TAG_BYTES)
    quiet = range(num_blocks // 4)  # a third would be its share
    for seed in quiet:
        assert tiers[seed % 8].write(key(seed), block(seed), "n", "quiet")
    for seed in range(10_000, 10_000 + 3 * num_blocks // 2):
        tenant = random_.choice(("loud", "louder"))
        assert tiers[random_.randrange(8)].write(key(seed), block(seed), "n", tenant)
        if not seed % 50:
            assert bytes_on_disk(tmp_path) <= CAPACITY
            reader = tiers[random_.randrange(8)]
            reader.refresh()
            assert all(key(seed) in reader for seed in quiet)
    sizes = tiers[0]._owner_bytes
    assert max(sizes.values()) <= CAPACITY / 2


def test_bytes_of_a_tenant_are_counted_once_when_a_block_is_indexed_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, CAPACITY, BLOCK)
    write_all = disk_tier._write_all

    def write_and_refresh(descriptor: int, data: bytes, offset: int) -> None:
        write_all(descriptor, data, offset)
        tier.refresh()

    monkeypatch.setattr(disk_tier, "_write_all", write_and_refresh)
    for seed in range(10):
        assert tier.write(key(seed), block(seed), "n", "a")
    assert all(is_intact(tier, seed) for seed in range(10))
    assert sum(tier._owner_bytes.values()) == 10 * (HEADER.size + BLOCK + TAG_BYTES)


def test_replicas_share_a_folder_and_its_budget(tmp_path: Path) -> None:
    tiers = [DiskTier(tmp_path, CAPACITY, BLOCK) for _ in range(3)]
    for seed in range(300):
        assert tiers[seed % 3].write(key(seed), block(seed), "n")
        assert bytes_on_disk(tmp_path) <= CAPACITY
    for tier in tiers:
        tier.refresh()
        assert all(is_intact(tier, seed) for seed in range(280, 300))
        assert not tier.failures


def test_another_namespace_or_another_folders_secret_opens_nothing(tmp_path: Path) -> None:
    one, two = (DiskTier(tmp_path / name, CAPACITY, BLOCK) for name in "ab")
    for seed in range(3):
        one.write(key(seed), block(seed), "n")
    assert one.read(key(0), "other") is None
    assert one.failures == {"authentication": 1}
    two.write(key(5), block(5), "n")
    (path,) = segments(tmp_path / "a")
    (tmp_path / "b" / path.name).write_bytes(path.read_bytes())
    two.refresh()
    assert key(1) in two
    assert two.read(key(1), "n") is None
    assert two.failures == {"authentication": 1}


def test_nothing_of_a_block_is_readable_on_disk(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, CAPACITY, BLOCK)
    payload = np.frombuffer(b"a secret prompt " * 100, dtype=np.uint8)[:BLOCK]
    tier.write(key(1), payload, "n")
    (path,) = segments(tmp_path)
    assert b"secret" not in path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0


def test_a_full_disk_is_counted_and_writing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, CAPACITY, BLOCK)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert not tier.write(key(1), block(1), "n")
        assert not tier.write(key(1), block(1), "n")
    assert tier.failures == {"disk_full": 1}
    assert segments(tmp_path) == []
    tier._paused_until = 0.0
    assert tier.write(key(1), block(1), "n")
    assert is_intact(tier, 1)


def test_a_full_disk_does_not_stop_a_replica_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, CAPACITY, BLOCK)
    assert tier.write(key(1), block(1), "n")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    assert tier.measure_read() > 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert tier.measure_read() == 0
        assert is_intact(DiskTier(tmp_path, CAPACITY, BLOCK), 1)


@pytest.mark.parametrize("folder", ["/proc/kv", "/dev/null/kv"])
def test_a_folder_that_cannot_be_written_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        DiskTier(Path(folder), CAPACITY, BLOCK)
    assert refusal.value.param == "kv_offloading_backend"


def test_a_budget_too_small_for_a_block_is_refused_with_the_least_that_works(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"at least 0\.0001") as refusal:
        DiskTier(tmp_path, NUM_SEGMENTS * 1000, BLOCK)
    assert refusal.value.param == "kv_offloading_size"


def faults(count: int, seed: int, folder: Path) -> None:
    """Damage a folder in many ways: no block that comes back may be a wrong one, and each that is
    missing was deleted or is in a counter.
    """
    random_ = random.Random(seed)
    writer = DiskTier(folder, CAPACITY, BLOCK)
    for number in range(90):
        writer.write(key(number), block(number), f"tenant {number % 2}")
    writer.close()
    pristine = {path: path.read_bytes() for path in segments(folder)}
    for _ in range(count):
        tier = DiskTier(folder, CAPACITY, BLOCK)
        path = random_.choice(list(pristine))
        data = bytearray(pristine[path])
        kind = random_.choice(("flip", "truncate", "exchange", "tear", "zero", "delete", "swap"))
        if kind == "flip":
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        elif kind == "truncate":
            del data[random_.randrange(len(data)) :]
        elif kind == "exchange":
            data[:] = pristine[random_.choice(list(pristine))]
        elif kind == "tear":
            end = random_.randrange(len(data))
            data[end:] = bytes(len(data) - end)
        elif kind == "zero":
            start = random_.randrange(len(data))
            data[start : start + 100] = bytes(len(data[start : start + 100]))
        elif kind == "swap":  # two records of a segment, headers and all
            size = 64 + BLOCK + 16
            data[:size], data[size : 2 * size] = data[size : 2 * size], data[:size]
        if kind == "delete":
            path.unlink()
        else:
            path.write_bytes(data)
        reopened = DiskTier(folder, CAPACITY, BLOCK)
        for store in (tier, reopened):
            indexed = set(store.keys())
            num_lost = sum(
                key(number) in indexed and not is_intact(store, number, f"tenant {number % 2}")
                for number in range(90)
            )
            assert num_lost == store.failures.total() - store.failures["header"], kind
            is_lost = len(indexed) < 90 and kind not in ("tear", "zero", "delete", "truncate")
            assert not is_lost or kind == "exchange" or store.failures["header"], kind
            # The other tenant gets nothing of what is there.
            other = random_.randrange(90)
            assert store.read(key(other), f"tenant {1 - other % 2}") is None
        path.write_bytes(pristine[path])


def test_no_fault_of_the_folder_gives_a_wrong_block(tmp_path: Path) -> None:
    faults(120, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 6))
def test_none_of_10_000_faults_of_the_folder_gives_a_wrong_block(tmp_path: Path, seed: int) -> None:
    """In four parts."""
    faults(2_500, seed, tmp_path)


def test_a_folder_that_is_gone_does_not_stop_the_statistics(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", CAPACITY, BLOCK)
    assert tier.write(key(1), block(1), "n")
    assert tier.used_bytes == bytes_on_disk(tmp_path / "kv") > 0
    shutil.rmtree(tmp_path / "kv")
    assert tier.used_bytes <= CAPACITY
    assert not is_intact(tier, 1)
    assert not tier.write(key(2), block(2), "n")


def test_clients_cannot_fill_memory_with_namespaces(tmp_path: Path) -> None:
    """A request's cache_salt makes a namespace."""
    tier = DiskTier(tmp_path, CAPACITY, BLOCK)
    for seed in range(500):
        tier.write(key(seed % 3), block(seed % 3), f"salt {seed}")
        tier.read(key(seed % 3), f"salt {seed}")
    tables = [value for value in vars(tier).values() if isinstance(value, dict)]
    assert max(map(len, tables)) < 100


@pytest.mark.parametrize("length", [0, 31])
def test_a_secret_that_was_not_written_whole_is_replaced(tmp_path: Path, length: int) -> None:
    """Ciphers of an empty secret would be anyone's."""
    DiskTier(tmp_path, CAPACITY, BLOCK).close()
    (tmp_path / "secret").write_bytes(bytes(length))
    tier = DiskTier(tmp_path, CAPACITY, BLOCK)
    assert len((tmp_path / "secret").read_bytes()) == 32
    assert tier.write(key(1), block(1), "n")
    assert is_intact(tier, 1)
