"""The block pool: free list, reference counts, cache entries."""

from __future__ import annotations

import pytest

from engine.kv_cache import Block, BlockPool
from engine.kv_cache.block import FreeBlockQueue


def ids(blocks: object) -> list[int]:
    return [block.block_id for block in blocks]  # type: ignore[attr-defined]


def test_free_list_keeps_order_and_removes_from_the_middle() -> None:
    blocks = [Block(i) for i in range(5)]
    free = FreeBlockQueue(blocks)
    free.remove(blocks[2])
    assert free.pop(1) == [blocks[0]]
    free.append(blocks[2])
    assert ids(free) == [1, 3, 4, 2]
    assert len(free) == 4


def test_free_list_refuses_a_block_that_is_in_it_or_not_in_it() -> None:
    blocks = [Block(i) for i in range(2)]
    free = FreeBlockQueue(blocks)
    with pytest.raises(RuntimeError, match="already"):
        free.append(blocks[0])
    [popped] = free.pop(1)
    with pytest.raises(RuntimeError, match="not in"):
        free.remove(popped)


def test_several_are_taken_from_the_head() -> None:
    free = FreeBlockQueue(Block(i) for i in range(4))
    assert ids(free.pop(3)) == [0, 1, 2]
    assert (ids(free), len(free)) == ([3], 1)
    assert ids(free.pop(1)) == [3]
    assert (ids(free), len(free)) == ([], 0)


def test_a_free_list_with_too_few_blocks_says_so_and_keeps_them() -> None:
    free = FreeBlockQueue([Block(0)])
    with pytest.raises(IndexError, match="2 blocks wanted, 1 are"):
        free.pop(2)
    assert ids(free) == [0]


def test_blocks_are_freed_in_reverse_so_the_longest_prefix_goes_first() -> None:
    pool = BlockPool(5)
    table = pool.get_new_blocks(3)
    pool.free_blocks(table)
    assert ids(pool.free_blocks_in_order) == [3, 4, 2, 1, 0]
    pool.check_integrity()


def test_a_shared_block_is_free_only_when_its_last_user_leaves() -> None:
    pool = BlockPool(3)
    table = pool.get_new_blocks(1)
    pool.cache_block(table[0], b"h")
    pool.touch(table)
    pool.free_blocks(table)
    assert table[0].ref_count == 1
    pool.check_integrity([("", table)])
    pool.free_blocks(table)
    assert pool.num_free_blocks == 3
    pool.check_integrity()


def test_touching_a_free_cached_block_saves_it_from_eviction() -> None:
    pool = BlockPool(2)
    first = pool.get_new_blocks(1)
    pool.cache_block(first[0], b"h")
    pool.free_blocks(first)
    cached_block = pool.get_cached_block(b"h")
    assert cached_block is first[0]
    pool.touch([cached_block])
    assert ids(pool.get_new_blocks(1)) == [1]
    assert pool.get_cached_block(b"h") is cached_block


def test_allocating_a_cached_free_block_evicts_its_content() -> None:
    pool = BlockPool(1)
    table = pool.get_new_blocks(1)
    pool.cache_block(table[0], b"h")
    pool.free_blocks(table)
    assert pool.num_cached == 1
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"h") is None
    assert pool.num_cached == 0


def test_duplicates_of_one_content_live_side_by_side() -> None:
    pool = BlockPool(3)
    table = pool.get_new_blocks(3)
    for block in table:
        pool.cache_block(block, b"h")
    pool.check_integrity([("", table)])
    pool.evict(table[0])
    assert pool.get_cached_block(b"h") is table[1]
    pool.evict(table[1])
    assert pool.get_cached_block(b"h") is table[2]
    pool.evict(table[2])
    assert pool.get_cached_block(b"h") is None
    pool.check_integrity([("", table)])


def test_more_blocks_than_there_are_is_an_error_and_changes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 are free"):
        pool.get_new_blocks(3)
    assert pool.num_free_blocks == 2


def test_the_cache_is_reset_only_when_no_block_is_in_use() -> None:
    pool = BlockPool(2)
    table = pool.get_new_blocks(1)
    pool.cache_block(table[0], b"h")
    assert not pool.reset_prefix_cache()
    pool.free_blocks(table)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(b"h") is None
    pool.check_integrity()


def test_integrity_check_finds_a_wrong_reference_count() -> None:
    pool = BlockPool(2)
    table = pool.get_new_blocks(1)
    table[0].ref_count = 2
    with pytest.raises(RuntimeError, match="block tables"):
        pool.check_integrity([("", table)])


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)
