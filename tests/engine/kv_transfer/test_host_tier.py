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
    tier.put([(key(seed), block(seed)) for seed in range(5)])
    assert [key(seed) in tier for seed in range(5)] == [True, True, True, False, False]


def test_the_least_recently_used_blocks_go_first_and_of_a_sequence_the_last() -> None:
    tier = HostTier(4 * BLOCK)
    tier.put([(key(seed), block(seed)) for seed in range(3)])
    tier.put([(key(3), block(3))])
    tier.get(key(1))
    tier.put([(key(4), block(4))])
    assert [key(seed) in tier for seed in range(5)] == [True, True, False, True, True]
    assert tier.used_bytes == 4 * BLOCK


def faults(count: int, seed: int) -> None:
    """Damage blocks: each is then either what was stored, or gone and counted."""
    random_ = random.Random(seed)
    for _ in range(count):
        tier = HostTier(COUNT * BLOCK)
        tier.put([(key(number), block(number).copy()) for number in range(COUNT)])
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
