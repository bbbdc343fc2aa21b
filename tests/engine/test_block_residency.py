"""How long sampled KV blocks stay, and how often they are used."""

from __future__ import annotations

from engine.kv_cache.block_pool import SAMPLE_EVERY, BlockPool


class Clock:
    """Seconds as a test sets them."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_block_that_is_hit_and_then_evicted() -> None:
    clock = Clock()
    pool = BlockPool(SAMPLE_EVERY, clock=clock)
    blocks = pool.get_new_blocks(SAMPLE_EVERY)
    followed = blocks[-1]
    pool.cache_block(followed, b"hash")
    clock.now = 10.0
    pool.free_blocks(blocks)
    clock.now = 25.0
    pool.touch([followed])
    clock.now = 40.0
    pool.free_blocks([followed])
    clock.now = 100.0
    pool.get_new_blocks(SAMPLE_EVERY)
    histograms = pool.residency.histograms.by_name
    assert histograms["kv_block_reuse_gap_seconds"].total == 15.0
    assert histograms["kv_block_lifetime_seconds"].total == 100.0
    assert histograms["kv_block_idle_before_evict_seconds"].total == 60.0
    assert all(sum(histogram.counts) == 1 for histogram in histograms.values())


def test_a_block_that_held_nothing_findable_was_not_evicted() -> None:
    pool = BlockPool(SAMPLE_EVERY, clock=Clock())
    for _ in range(3):
        pool.free_blocks(pool.get_new_blocks(SAMPLE_EVERY))
    assert not any(h.total or any(h.counts) for h in pool.residency.histograms.by_name.values())


def test_emptying_the_cache_follows_nothing_any_more() -> None:
    clock = Clock()
    pool = BlockPool(SAMPLE_EVERY, clock=clock)
    blocks = pool.get_new_blocks(SAMPLE_EVERY)
    pool.cache_block(blocks[-1], b"hash")
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    pool.cache_block(pool.get_new_blocks(1)[0], b"other")
    clock.now = 9.0
    pool.get_new_blocks(SAMPLE_EVERY - 1)
    assert not any(h.total for h in pool.residency.histograms.by_name.values())
