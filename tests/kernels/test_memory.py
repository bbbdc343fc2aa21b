"""A KV cache's memory: mapped when it's written, or before."""

from __future__ import annotations

from resource import RUSAGE_SELF, getrusage
from threading import Thread

import pytest
import torch


def faults() -> int:
    """Pages that the system has mapped for this process so far."""
    return getrusage(RUSAGE_SELF).ru_minflt


def test_mapped_pages_cost_nothing_when_they_are_written(compiled):
    cache, other = (compiled.new_kv_cache((16, 1, 1, 1 << 20), torch.int8) for _ in range(2))
    other.fill_(1)  # torch's own threads and code have their pages by now
    initial_faults = faults()
    compiled.map_pages(cache[:12])
    mapped = faults()
    assert mapped > initial_faults
    cache[:12].fill_(1)
    assert faults() - mapped <= 8 + (mapped - initial_faults) // 4


def test_mapping_changes_nothing(kernels):
    cache = kernels.new_kv_cache((3, 1, 16, 1000), torch.int8)
    cache.copy_(torch.randint(-128, 128, cache.shape))
    initial_copy = cache.clone()
    kernels.map_pages(cache)
    kernels.map_pages(cache[1:2])
    kernels.map_pages(cache[:0])
    assert torch.equal(cache, initial_copy)


def test_others_may_write_meanwhile(compiled):
    cache = compiled.new_kv_cache((64, 1, 16, 4096), torch.int8)
    mapping = Thread(target=lambda: [compiled.map_pages(cache) for _ in range(20)])
    mapping.start()
    for value in range(1, 21):
        cache.fill_(value)
        assert (cache == value).all()
    mapping.join()


def test_only_whole_blocks_are_mapped(compiled):
    with pytest.raises(ValueError, match="contiguous"):
        compiled.map_pages(torch.zeros(4, 4).t())


@pytest.mark.parametrize("blocks", [1 << 45, 1 << 70])
def test_more_than_any_machine_has_is_refused(kernels, blocks):
    with pytest.raises(MemoryError, match="the system refuses to map"):
        kernels.new_kv_cache((blocks, 1, 16, 64), torch.float32)
