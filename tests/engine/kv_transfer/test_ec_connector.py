"""Outputs of encoders in tiers: as they were, although parts of them are evicted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kv_transfer import peer_tier
from engine.kv_transfer.disk_tier import DiskTier
from engine.kv_transfer.ec_connector import ECConnector
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.peer_tier import PeerTier
from engine.kv_transfer.storage_queue import StorageQueue

BLOCK = 1024
KEY, OTHER = b"picture", b"other picture"


def output_of(seed: int) -> Tensor:
    """More than three payloads."""
    return torch.randn(14, 64, generator=torch.Generator().manual_seed(seed))


def connector_of(host: HostTier, storage: StorageQueue | None = None) -> ECConnector:
    device = torch.device("cpu")
    return ECConnector(host, storage, b"numerics", BLOCK, device, saves=True, loads=True)


def has(connector: ECConnector, key: bytes, seed: int) -> bool:
    output = connector.start_load_caches(key)
    assert output is None or torch.equal(output, output_of(seed))
    return output is not None


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[StorageQueue]:
    storage = StorageQueue(DiskTier(tmp_path, 1 << 20, BLOCK), HostTier(1 << 20))
    yield storage
    storage.close()


def test_an_output_of_which_a_part_was_evicted_is_saved_again() -> None:
    host = HostTier(16 * BLOCK)
    connector = connector_of(host)
    connector.save_caches(KEY, output_of(1), "t", "n")
    assert has(connector, KEY, 1)
    last = next(iter(host._blocks))
    host.remove(last)
    assert not has(connector, KEY, 1)
    connector.save_caches(KEY, output_of(1), "t", "n")
    assert has(connector, KEY, 1)


def test_what_a_storage_has_lost_of_an_output_is_written_again(storage: StorageQueue) -> None:
    connector = connector_of(storage._host, storage)
    connector.save_caches(KEY, output_of(1), "t", "n")
    storage.flush(60)
    tier = storage.tier
    assert isinstance(tier, DiskTier)
    keys = tier.keys()
    assert len(keys) == 4
    tier._index.pop(keys[-1])
    connector.save_caches(KEY, output_of(1), "t", "n")
    storage.flush(60)
    assert len(tier.keys()) == 4


def test_parts_that_host_memory_has_lost_are_read_again(storage: StorageQueue) -> None:
    host = storage._host
    connector = connector_of(host, storage)
    connector.save_caches(KEY, output_of(1), "t", "n")
    storage.flush(60)
    assert connector.start_read_ahead([KEY], "t", "n") == []
    for key in list(host._blocks)[:2]:  # the last ones: those are evicted first
        host.remove(key)
    assert not has(connector, KEY, 1)
    [reading] = connector.start_read_ahead([KEY], "t", "n")
    reading.result(60)
    assert has(connector, KEY, 1)
    host.clear()
    [reading] = connector.start_read_ahead([KEY], "t", "n")
    reading.result(60)
    assert has(connector, KEY, 1)


def test_outputs_are_read_from_the_memory_of_the_replica_that_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_tier, "LEASE_S", 60.0)
    url = "tcp://127.0.0.1:0"
    theirs, ours = (
        StorageQueue(PeerTier(url, 1 << 20, BLOCK, serves=serves), HostTier(1 << 20))
        for serves in (True, False)
    )
    connector_of(theirs._host, theirs).save_caches(KEY, output_of(1), "t", "n")
    theirs.flush(60)
    connector = connector_of(ours._host, ours)
    assert connector.start_read_ahead([KEY], "t", "n") == []
    [reading] = connector.start_read_ahead([KEY], "t", "n", theirs.tier.address)
    reading.result(60)
    assert has(connector, KEY, 1)
    for storage in (theirs, ours):
        storage.close()


def test_an_output_that_was_used_outlives_one_that_was_not() -> None:
    host = HostTier(9 * BLOCK)
    connector = connector_of(host)
    connector.save_caches(KEY, output_of(1), "t", "n")
    connector.save_caches(OTHER, output_of(2), "t", "n")
    assert has(connector, KEY, 1)
    connector.save_caches(b"third", output_of(3), "t", "n")
    assert has(connector, KEY, 1)
    assert not has(connector, OTHER, 2)
