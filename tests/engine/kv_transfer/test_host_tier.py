"""KV blocks in host memory: what has changed isn't used."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.kv_cache.kv_cache_config import KVCacheConfig, KVCacheGroupSpec
from engine.kv_transfer.block_buffers import BlockBuffers
from engine.kv_transfer.host_tier import HostTier
from tests.engine.kv_transfer.test_disk_tier import BLOCK, block, key

COUNT = 20


def test_the_first_blocks_of_a_sequence_that_is_too_long_are_stored() -> None:
    tier = HostTier(3 * BLOCK)
    tier.put([(key(seed), block(seed)) for seed in range(5)], "t")
    assert [key(seed) in tier for seed in range(5)] == [True, True, True, False, False]


def test_the_least_recently_used_blocks_go_first_and_of_a_sequence_the_last() -> None:
    tier = HostTier(4 * BLOCK)
    tier.put([(key(seed), block(seed)) for seed in range(3)], "t")
    tier.put([(key(3), block(3))], "t")
    tier.touch([key(1)])
    tier.put([(key(4), block(4))], "t")
    assert [key(seed) in tier for seed in range(5)] == [True, True, False, True, True]
    assert tier.used_bytes == 4 * BLOCK


def test_of_a_sequence_that_was_used_again_the_last_blocks_go_first() -> None:
    tier = HostTier(4 * BLOCK)
    tier.put([(key(seed), block(seed)) for seed in range(3)], "t")
    tier.put([(key(3), block(3))], "t")
    tier.touch([key(seed) for seed in range(3)])
    tier.put([(key(seed), block(seed)) for seed in (4, 5)], "t")
    assert [key(seed) in tier for seed in range(6)] == [True, True, False, False, True, True]


def test_a_tenant_cannot_push_out_what_is_within_another_ones_share() -> None:
    tier = HostTier(10 * BLOCK)
    tier.put([(key(seed), block(seed)) for seed in range(4)], "quiet")
    for seed in range(100, 150):
        tier.put([(key(seed), block(seed))], "loud")
        assert tier.used_bytes <= tier.capacity
        assert tier.tenant_bytes("quiet") == 4 * BLOCK
    assert tier.tenant_bytes("loud") == 6 * BLOCK
    assert all(key(seed) in tier for seed in (0, 1, 2, 3, 149))


def test_tenants_share_host_memory_equally_and_one_alone_has_all_of_it() -> None:
    tier = HostTier(12 * BLOCK)
    random_ = random.Random(1)
    for seed in range(30):
        tier.put([(key(seed), block(seed))], "a")
    assert tier.tenant_bytes("a") == 12 * BLOCK
    for seed in range(30, 300):
        tier.put([(key(seed), block(seed))], random_.choice("abc"))
    assert {tenant: tier.tenant_bytes(tenant) for tenant in "abc"} == dict.fromkeys(
        "abc", 4 * BLOCK
    )
    tier.clear()
    assert (tier.used_bytes, len(tier), tier.tenant_bytes("a")) == (0, 0, 0)
    tier.put([(key(1), block(1))], "a")
    assert tier.tenant_bytes("a") == BLOCK


def faults(count: int, seed: int) -> None:
    """Damage blocks: each is then either what was stored, or gone and counted."""
    random_ = random.Random(seed)
    for _ in range(count):
        tier = HostTier(COUNT * BLOCK)
        tier.put([(key(number), block(number).copy()) for number in range(COUNT)], "t")
        one, two = random_.sample(range(COUNT), 2)
        payload, checksum = tier._blocks[key(one)]
        damaged = {one}
        kind = random_.choice(("flip", "exchange", "truncate", "checksum"))
        if kind == "flip":
            payload[random_.randrange(BLOCK)] ^= np.uint8(1 << random_.randrange(8))
        elif kind == "exchange":  # two tenants' blocks, with their checksums
            tier._blocks[key(one)], tier._blocks[key(two)] = (
                tier._blocks[key(two)],
                tier._blocks[key(one)],
            )
            damaged.add(two)
        elif kind == "truncate":
            tier._blocks[key(one)] = payload[: random_.randrange(BLOCK)], checksum
        else:
            tier._blocks[key(one)] = payload, checksum ^ 1 << random_.randrange(128)
        for number in range(COUNT):
            payload_read = tier.get(key(number))
            if number in damaged:
                assert payload_read is None, kind
            else:
                assert payload_read is not None
                assert payload_read.tobytes() == block(number).tobytes(), kind
        assert tier.failures == {"checksum": len(damaged)}


@pytest.mark.parametrize(
    "group", [0, 1, 2], ids=["whole payload", "with padding", "three payloads"]
)
def test_blocks_are_verified_while_they_are_written_into_the_kv_cache(group: int) -> None:
    groups = (
        KVCacheGroupSpec("full", (0,)),
        KVCacheGroupSpec("window", (1,), window=8),
        KVCacheGroupSpec("state", ()),
    )
    sizes = [600, 400, 1500]
    caches = {str(size): (torch.zeros(2, size, dtype=torch.uint8),) for size in sizes}
    buffers = BlockBuffers(caches, KVCacheConfig(groups, 1))
    length = buffers.block_bytes
    assert (length, buffers.num_payloads) == (600, [1, 1, 3])
    content = caches[str(sizes[group])][0][1]
    content.copy_(torch.arange(sizes[group]) % 251)
    expected, payloads = content.clone(), buffers.read(group, 1)
    keys = [key(index) for index in range(len(payloads))]
    for damaged in (None, *range(0, length, 29), length - 1):
        tier = HostTier(10 * length)
        tier.put([(k, p.copy()) for k, p in zip(keys, payloads, strict=True)], "t")
        if damaged is not None:
            tier._blocks[keys[-1]][0][damaged] ^= np.uint8(1)
        content.zero_()
        stored = [block for one_key in keys if (block := tier.read(one_key)) is not None]
        assert buffers.write_verified(group, 1, stored) == (damaged is None)
        assert damaged is not None or torch.equal(content, expected)


def test_payloads_of_a_gpu_are_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the GPU and for the memory that it pins."""
    cache, pinned, empty = torch.arange(60, dtype=torch.uint8).view(2, 30), [], torch.empty

    def pin(*args: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        assert pin_memory
        pinned.append(empty(*args, **kwargs))
        return pinned[-1]

    layout = KVCacheConfig((KVCacheGroupSpec("full", (0,)),), 1)
    buffers = BlockBuffers({"0": (cache,)}, layout)
    monkeypatch.setattr(torch, "empty", pin)
    buffers.read(0, 1)
    assert not pinned
    assert buffers.host_block_bytes == 30
    buffers._pins = True
    assert buffers.host_block_bytes == 32
    [payload] = buffers.read(0, 1)
    assert payload.tobytes() == bytes(range(30, 60))
    assert payload.ctypes.data == pinned[0].data_ptr()


def test_no_fault_of_host_memory_gives_a_wrong_block() -> None:
    faults(300, 1)


@pytest.mark.slow
def test_none_of_10_000_faults_of_host_memory_gives_a_wrong_block() -> None:
    faults(10_000, 2)
