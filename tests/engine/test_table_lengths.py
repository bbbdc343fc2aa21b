"""Block tables have a length by KV cache group: a group may need other blocks than one per so many
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.contract.sampling_params import SamplingParams
from engine.kv_cache import KVCacheConfig, KVCacheGroupSpec, make_coordinator
from engine.kv_cache.block import Block
from engine.kv_cache.prefix_cache import BlockHashes
from engine.scheduler.plan import NewSequence, StepPlan
from engine.worker.input_batch import InputBatch

BLOCK_SIZE = 4


class OneBlock(KVCacheGroupSpec):
    """A group whose sequences have one block, whatever their length, as states need."""

    def table_length(self, num_tokens: int, block_size: int) -> int:
        return 1


LAYOUT = KVCacheConfig((KVCacheGroupSpec("full", (0,)), OneBlock("full", (1,))), 1)


@dataclass
class Uncacheable:
    seq_id: int
    token_ids: list[int]
    block_hashes: BlockHashes


def ids(tables: list[list[Block]]) -> list[int]:
    return [len(table) for table in tables]


def test_a_sequence_takes_the_blocks_of_each_groups_own_length() -> None:
    kv = make_coordinator(LAYOUT, 8, BLOCK_SIZE, enable_caching=False)
    sequence, quota = Uncacheable(3, [1] * 9, BlockHashes(b"")), kv.quotas.get("")
    assert kv.max_blocks_per_sequence(20, 20) == 5 + 1
    blocks = kv.allocate_slots(sequence, quota, 0, 9, kv.empty_prefix())
    assert blocks is not None
    assert ids(blocks) == ids(kv.get_block_tables(3)) == [3, 1]
    blocks = kv.allocate_slots(sequence, quota, 9, 4)
    assert blocks is not None
    assert ids(blocks) == [1, 0]
    assert kv.allocate_slots(sequence, quota, 13, 1) == []
    assert kv.num_blocks_after(3, 14, 6) == 5 + 1
    assert kv.num_blocks_to_allocate(3, 14, 15) == 4
    assert kv.allocate_slots(sequence, quota, 14, 15) is None  # of 8 blocks 5 are taken
    kv.check_integrity({3: ""})
    kv.free(3, quota)
    assert kv.pool.num_free_blocks == 8


def test_the_worker_appends_to_each_groups_table_at_its_own_end() -> None:
    batch = InputBatch(2, 16, BLOCK_SIZE, LAYOUT)
    assert [table.shape[1] for table in batch.block_tables] == [4, 1]
    new = NewSequence(3, [1] * 9, 9, 0, [[5, 6, 7], [2]], SamplingParams(), 0)
    batch.apply_plan(StepPlan(0, [3], [9], [1], new=[new]))
    batch.apply_plan(StepPlan(1, [3], [1], [1], new_blocks=[(3, [[4], []])]))
    row = batch.row_of[3]
    assert [table[row].tolist() for table in batch.block_tables] == [[5, 6, 7, 4], [2]]
    assert batch.num_blocks[:, row].tolist() == [4, 1]


@pytest.mark.parametrize(("window", "kind"), [(0, "full"), (8, "window")])
def test_tables_of_attention_have_a_block_for_every_so_many_tokens(window: int, kind: str) -> None:
    group = KVCacheGroupSpec(kind, (0,), window)  # type: ignore[arg-type]
    assert [group.table_length(count, BLOCK_SIZE) for count in (1, 4, 5, 16)] == [1, 1, 2, 4]
