"""Hybrid KV cache with numbers: layouts, block tables, prefix hits (`docs/prefix-caching.md`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.kv_cache import NULL_BLOCK, BlockHashes, make_coordinator
from engine.kv_cache.coordinators import HybridKVCacheCoordinator, UnitaryKVCacheCoordinator
from engine.kv_cache.kv_cache_config import make_kv_cache_config, single_group_config
from engine.kv_cache.prefix_cache import group_key
from engine.kv_cache.single_type_managers import FullAttentionManager, SlidingWindowManager
from tests.engine.helpers import Driver

LONG = 10**6


def uncached(num_tokens: int) -> SimpleNamespace:
    """A sequence of which nothing is computed."""
    return SimpleNamespace(seq_id=0, token_ids=list(range(num_tokens)), block_hashes=BlockHashes())


def ids(table: list) -> list[int | None]:
    return [None if block is NULL_BLOCK else block.block_id for block in table]


# -- which layers share a block -------------------------------------------------------------------


def test_one_full_and_three_sliding_layers_are_four_groups_of_one_layer() -> None:
    layout = make_kv_cache_config((0, 32, 32, 32), 4, LONG)
    assert [group.layers for group in layout.groups] == [(0,), (1,), (2,), (3,)]
    assert layout.windows == (0, 32, 32, 32)
    assert layout.layers_per_block == 1


def test_ten_full_and_twenty_sliding_layers_are_three_groups_of_ten() -> None:
    windows = (32, 32, 0) * 10
    layout = make_kv_cache_config(windows, 30, LONG)
    assert [len(group.layers) for group in layout.groups] == [10, 10, 10]
    assert layout.groups[0].layers == tuple(range(2, 30, 3))
    assert layout.windows == (0, 32, 32)
    groups, slots = layout.group_by_layer(), layout.slot_by_layer()
    assert [windows[i] for i in range(30)] == [layout.windows[group] for group in groups]
    # No two layers of a group share a slot.
    assert len(set(zip(groups, slots, strict=True))) == 30


def test_ten_full_and_52_sliding_layers_are_seven_groups_with_eight_empty_slots() -> None:
    windows = ((1024,) * 5 + (0,)) * 10 + (1024, 1024)
    layout = make_kv_cache_config(windows, 62, LONG)
    assert [len(group.layers) for group in layout.groups] == [10] * 6 + [2]
    assert layout.windows == (0,) + (1024,) * 6
    assert layout.layers_per_block == 10


def test_twenty_full_and_thirty_sliding_layers_are_groups_of_ten_not_of_twenty() -> None:
    layout = make_kv_cache_config((0,) * 20 + (8,) * 30, 50, LONG)
    assert layout.layers_per_block == 10
    assert len(layout.groups) == 5


def test_types_of_nearly_equal_number_share_large_blocks() -> None:
    assert make_kv_cache_config((0,) * 13 + (8,) * 14, 27, LONG).layers_per_block == 14


def test_a_window_that_no_context_outgrows_is_full_attention() -> None:
    assert make_kv_cache_config((0, 4096), 2, 4096) == single_group_config(2)
    assert make_kv_cache_config((0, 4095), 2, 4096).windows == (0, 4095)


def test_the_switch_gives_every_layer_all_blocks() -> None:
    assert make_kv_cache_config((0, 8, 8), 3, LONG, hybrid=False) == single_group_config(3)


@pytest.mark.parametrize(
    ("windows", "managers"),
    [
        (None, [FullAttentionManager]),
        ((0, 0), [FullAttentionManager]),
        ((8, 8), [SlidingWindowManager]),
        ((0, 8), [FullAttentionManager, SlidingWindowManager]),
    ],
)
def test_each_group_has_the_manager_of_its_type(
    windows: tuple[int, ...] | None, managers: list[type]
) -> None:
    layout = None if windows is None else make_kv_cache_config(windows, 2, LONG)
    kv = make_coordinator(layout, 8, 4)
    assert [type(manager) for manager in kv.managers] == managers
    several = len(managers) > 1
    assert type(kv) is (HybridKVCacheCoordinator if several else UnitaryKVCacheCoordinator)


# -- how many blocks, and which -------------------------------------------------------------------


def test_112_tokens_of_ten_full_and_twenty_sliding_layers_take_eleven_blocks() -> None:
    kv = make_coordinator(make_kv_cache_config((32, 32, 0) * 10, 30, LONG), 20, 16)
    # Every token but the last is computed; the last one's window begins in block 5.
    assert kv.num_blocks_to_allocate(0, 111, 1) == 11
    kv.allocate_slots(uncached(0), kv.quotas.get(""), 111, 1, kv.empty_prefix())
    early = [None] * 5
    assert [ids(table) for table in kv.get_block_tables(0)] == [
        [0, 1, 2, 3, 4, 5, 6],
        [*early, 7, 8],
        [*early, 9, 10],
    ]


def test_a_prompt_of_112_tokens_holds_eleven_blocks_once_it_is_computed() -> None:
    driver = Driver(num_blocks=64, token_budget=16, block_size=16, windows=(32, 32, 0) * 10)
    sequence = driver.add(list(range(112)))
    for _ in range(7):
        driver.step()
    kv = driver.scheduler.kv
    kv.free_skipped_blocks(
        sequence.seq_id, driver.scheduler._runs.quota_of(sequence), sequence.num_computed_tokens
    )
    assert [
        sum(block is not NULL_BLOCK for block in table) for table in kv.get_block_tables(0)
    ] == [
        7,
        2,
        2,
    ]
    assert driver.scheduler.kv.pool.num_free_blocks == 64 - 11


def test_the_walk_through_of_the_documentation() -> None:
    driver = Driver(num_blocks=16, windows=(0, 8))

    # Time 1: 15 tokens take four blocks of each group, for a step writes before it reads.
    zero = driver.add(list(range(100, 115)))
    driver.step()
    assert driver.tables(zero) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    # Time 2: the 16th token sees tokens 8 to 15; blocks 4 and 5 hold the eight before them.
    driver.step()
    assert driver.tables(zero) == [[0, 1, 2, 3], [None, None, 6, 7]]
    assert driver.free_ids() == [8, 9, 10, 11, 12, 13, 14, 15, 5, 4]

    # Time 3: the 17th token needs a block in each group.
    driver.step()
    assert driver.tables(zero) == [[0, 1, 2, 3, 8], [None, None, 6, 7, 9]]

    # Time 4: 14 tokens, the first 10 as request 0's. Two blocks hit in both groups; 4 and 5 come
    # out of the free list.
    one = driver.add([*range(100, 110), 1, 2, 3, 4])
    driver.step()
    assert one.num_cached_tokens == 8
    assert driver.tables(one) == [[0, 1, 10, 11], [4, 5, 12, 13]]
    assert driver.free_ids() == [14, 15]

    # Time 5: both requests end.
    driver.scheduler.finish(zero, "stop")
    assert driver.free_ids() == [14, 15, 8, 3, 2, 9, 7, 6]
    driver.scheduler.finish(one, "stop")
    assert driver.free_ids() == [14, 15, 8, 3, 2, 9, 7, 6, 11, 10, 1, 0, 13, 12, 5, 4]

    # Time 6: 29 tokens, the first 12 as request 0's. The next token sees tokens 5 to 12, so the
    # sliding group leaves out its first block.
    two = driver.add([*range(100, 112), *range(200, 217)])
    driver.step()
    assert two.num_cached_tokens == 12
    assert driver.tables(two) == [
        [0, 1, 2, 14, 15, 8, 3, 9],
        [None, 5, 6, 7, 11, 10, 13, 12],
    ]
    assert driver.free_ids() == [4]


def test_blocks_that_left_the_window_serve_others_while_the_sequence_runs() -> None:
    driver = Driver(num_blocks=4, windows=(4,), token_budget=4)
    sequence = driver.add(list(range(4)))
    for _ in range(200):
        driver.step()
    assert sequence.num_tokens == 204
    assert sequence.timeline.num_preemptions == 0
    assert sum(block is not NULL_BLOCK for block in driver.blocks(sequence)) <= 2


# -- prefix hits, with blocks of one token --------------------------------------------------------


def hit_length(windows: tuple[int, ...], cached: dict[int, set[int]], num_tokens: int) -> int:
    """Tokens of the prefix found when these blocks (by group) of a prompt are cached."""
    kv = make_coordinator(make_kv_cache_config(windows, len(windows), LONG), 100, 1)
    sequence = uncached(num_tokens)
    keys = sequence.block_hashes.hash_full_blocks(sequence.token_ids, 1)
    several = len(kv.managers) > 1
    for group, tokens in cached.items():
        for token in sorted(tokens):
            block = kv.pool.get_new_blocks(1)[0]
            kv.pool.cache_block(block, keys[token] + (group_key(group) if several else b""))
    prefix = kv.get_computed_blocks(sequence)
    for window, table in zip(kv.windows, prefix.blocks, strict=True):
        first = max(0, len(table) - window + 1) if window else 0
        assert [block is NULL_BLOCK for block in table] == [
            index < first for index in range(len(table))
        ]
    return prefix.num_tokens


def test_full_attention_hits_from_the_left_until_the_first_miss() -> None:
    assert hit_length((0,), {0: {0, 1, 2, 3, 4, 5, 6, 8, 9}}, 12) == 7


@pytest.mark.parametrize(
    ("cached", "hit"),
    [
        ({2, 3, 4, 5, 11, 12, 13}, 14),
        ({2, 3, 4, 5, 11, 12}, 6),
        ({2, 3, 4, 11, 12}, 5),
        ({2, 3, 5, 6, 8, 9, 11, 12}, 0),
        ({0, 1}, 2),
        (set(), 0),
        (set(range(15)), 14),
    ],
)
def test_a_window_of_four_needs_only_the_last_three_tokens(cached: set[int], hit: int) -> None:
    assert hit_length((4,), {0: cached}, 15) == hit


@pytest.mark.parametrize(
    ("full", "sliding", "hit"),
    [
        (set(range(7)), {2, 3, 4, 5, 11, 12, 13}, 6),
        (set(range(15)), {2, 3, 4, 5, 11, 12, 13}, 14),
        (set(range(5)), {3, 4, 5}, 0),
        ({1, 2, 3, 4, 5}, {2, 3, 4}, 0),
        (set(range(9)), set(range(9)), 9),
    ],
)
def test_the_hit_of_a_window_lies_within_that_of_full_attention(
    full: set[int], sliding: set[int], hit: int
) -> None:
    assert hit_length((0, 4), {0: full, 1: sliding}, 15) == hit


def test_every_group_of_a_type_must_have_the_block() -> None:
    everything, without_nine = set(range(12)), set(range(12)) - {9}
    assert hit_length((0, 4, 4), {0: everything, 1: everything, 2: without_nine}, 12) == 9


def test_several_windows_are_searched_until_they_agree() -> None:
    # A window of 2 hits at 10; one of 4 then only at 7, where the window of 2 hits too.
    narrow, wide = {0, 1, 2, 3, 4, 5, 6, 9}, {4, 5, 6}
    assert hit_length((2, 4), {0: narrow, 1: wide}, 15) == 7
    # Without token 6 the narrow window sends the search on to nothing.
    assert hit_length((2, 4), {0: {9}, 1: wide}, 15) == 0


def test_a_cold_prompt_costs_one_look_up_a_window() -> None:
    hybrid = make_coordinator(make_kv_cache_config((0, 64), 2, LONG), 10, 1)
    sliding = make_coordinator(make_kv_cache_config((65,), 1, LONG), 10, 1)
    for kv, max_calls in ((hybrid, 1), (sliding, 17)):
        calls = 0
        lookup = kv.pool.get_cached_block

        def counting(key: bytes) -> object:
            nonlocal calls
            calls += 1
            return lookup(key)  # noqa: B023

        kv.pool.get_cached_block = counting  # type: ignore[assignment,method-assign]
        assert kv.get_computed_blocks(uncached(1024)).num_tokens == 0
        assert calls <= max_calls
