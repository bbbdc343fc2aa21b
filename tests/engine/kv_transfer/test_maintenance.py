"""Reading all records of a tier without its tenants' keys, and dropping them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kv_transfer.disk_tier import DiskTier
from engine.kv_transfer.maintenance import drop, verify
from engine.kv_transfer.remote_tier import RemoteTier, make_store, record_bytes
from engine.kv_transfer.storage_tier import HEADER
from tests.engine.kv_transfer.remote_stores import Records, running_store
from tests.engine.kv_transfer.test_disk_tier import BLOCK, CAPACITY, block, key, segments

NUM_BLOCKS = 5


def filled(folder: Path) -> DiskTier:
    tier = DiskTier(folder, CAPACITY, BLOCK)
    assert all(tier.write(key(seed), block(seed), f"tenant {seed}") for seed in range(NUM_BLOCKS))
    return tier


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_folder_as_it_was_written_is_verified_beside_its_writer(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    report = verify(str(tmp_path))
    assert (report.num_records, report.failures) == (NUM_BLOCKS, {})
    assert report.num_bytes == NUM_BLOCKS * record_bytes(BLOCK)
    assert tier.read(key(4), "tenant 4") is not None
    tier.close()


@pytest.mark.parametrize(
    ("offset", "reason"),
    [(0, "header"), (10, "checksum"), (42, "checksum"), (HEADER.size, "checksum")],
    ids=["magic", "key", "nonce", "block"],
)
def test_a_flipped_bit_in_a_folder_is_counted(tmp_path: Path, offset: int, reason: str) -> None:
    filled(tmp_path).close()
    flip(segments(tmp_path)[0], offset)
    assert verify(str(tmp_path)).failures == {reason: 1}


def test_a_folder_is_dropped_and_goes_on_being_written(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    assert drop(str(tmp_path)).num_bytes > 0
    assert verify(str(tmp_path)).num_records == 0
    tier.refresh()
    assert tier.read(key(0), "tenant 0") is None
    assert tier.write(key(0), block(0), "tenant 0")
    assert tier.read(key(0), "tenant 0") is not None
    tier.close()


def test_a_segment_that_a_replica_deletes_meanwhile_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path).close()
    listed = [tmp_path / "deleted.kv", *segments(tmp_path)]
    monkeypatch.setattr("engine.kv_transfer.maintenance._segments", lambda folder: listed)
    assert verify(str(tmp_path)).num_records == NUM_BLOCKS
    assert drop(str(tmp_path)).num_bytes > 0
    assert not segments(tmp_path)


@pytest.fixture(scope="module", params=["redis", "s3"])
def records(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Records]:
    with running_store(request.param, tmp_path_factory.mktemp("store")) as store:
        yield store


def test_a_stores_records_are_verified_and_dropped(records: Records) -> None:
    capacity = 20 * record_bytes(BLOCK)
    tier = RemoteTier(make_store(records.url, capacity, BLOCK), capacity, BLOCK)
    assert all(tier.write(key(seed), block(seed), "n") for seed in range(NUM_BLOCKS))
    assert verify(records.url).failures == {}
    first, second, third, *_ = records.names()
    record = records.get(first)
    records.set(first, record[:-1])
    changed = records.get(second)
    records.set(second, changed[:-1] + bytes([changed[-1] ^ 1]))
    records.set(third, record)
    report = verify(records.url)
    assert report.num_records == NUM_BLOCKS
    assert report.failures == {"truncated": 1, "checksum": 1, "authentication": 1}
    assert drop(records.url).num_records == NUM_BLOCKS
    assert not records.names()
    tier.refresh()
    assert tier.used_bytes == 0 or records.url.startswith("s3:")
    assert tier.read(key(0), "n") is None
    assert tier.write(key(0), block(0), "n")
    assert tier.read(key(0), "n") is not None
    tier.close()
