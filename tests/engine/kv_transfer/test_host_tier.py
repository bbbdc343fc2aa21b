"""KV blocks in host memory: what has changed isn't used."""

from __future__ import annotations

import random

import numpy as np
import pytest

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


def test_no_fault_of_host_memory_gives_a_wrong_block() -> None:
    faults(300, 1)


@pytest.mark.slow
def test_none_of_10_000_faults_of_host_memory_gives_a_wrong_block() -> None:
    faults(10_000, 2)
