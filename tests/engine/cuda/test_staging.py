"""One copy for all inputs of a step: packed, padded, and apart again on the other side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.models.forward_context import AttentionMetadata, StateStep
from engine.worker.gpu.graph_dispatcher import BatchDescriptor
from engine.worker.gpu.input_buffers import (
    Download,
    SampledTokenFeed,
    StaticInputBuffers,
    send,
    stage_inputs,
)
from kernels.lora import LoraSlots

CPU = torch.device("cpu")


def test_arrays_of_all_kinds_arrive_in_one_allocation() -> None:
    arrays = [
        np.arange(5, dtype=np.int32),
        np.zeros(0, dtype=np.int64),
        np.array([[1.5, 2.5, 3.5]], dtype=np.float64),
        np.array([True, False]),
        np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
    ]
    staged = send(arrays, CPU)
    for array, tensor in zip(arrays, staged, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array.copy()))
        assert tensor.data_ptr() % 16 == 0 or not tensor.numel()
    assert len({tensor.untyped_storage().data_ptr() for tensor in staged if tensor.numel()}) == 1


def test_what_is_sent_is_a_copy() -> None:
    array = np.ones(3, dtype=np.int64)
    (remote_tensor,) = send([array], CPU)
    array[:] = 7
    assert remote_tensor.tolist() == [1, 1, 1]


def test_nothing_is_waited_for_where_there_is_no_device() -> None:
    tensor = torch.arange(3)
    assert Download([tensor], None).wait()[0] is tensor


def batch() -> tuple[torch.Tensor, AttentionMetadata]:
    """Two decodes and a prompt of three tokens, in two groups."""
    first = AttentionMetadata(
        positions=torch.tensor([4, 9, 0, 1, 2]),
        slot_mapping=torch.tensor([20, 41, 80, 81, 82]),
        block_tables=torch.tensor([[1, 0], [2, 3], [5, 0]], dtype=torch.int32),
        seq_lens=torch.tensor([5, 10, 3], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 2, 5], dtype=torch.int32),
        logits_rows=torch.tensor([0, 1, 4]),
        num_decodes=2,
        prefill_start_loc=torch.tensor([0, 3], dtype=torch.int32),
    )
    second = AttentionMetadata(
        positions=first.positions,
        slot_mapping=first.slot_mapping + 100,
        block_tables=first.block_tables + 6,
        seq_lens=first.seq_lens,
        query_start_loc=first.query_start_loc,
    )
    first.other_groups = (second,)
    return torch.tensor([7, 8, 11, 12, 13]), first


def test_a_step_is_padded_for_its_graph_and_whole_for_the_rest() -> None:
    ids, context = batch()
    step = stage_inputs(ids, context, CPU, BatchDescriptor(8, 4, False))
    assert step.token_ids.tolist() == [7, 8, 11, 12, 13, 0, 0, 0]
    padded = step.padded
    assert padded.positions.tolist() == [4, 9, 0, 1, 2, 0, 0, 0]
    assert padded.slot_mapping.tolist() == [20, 41, 80, 81, 82, -1, -1, -1]
    assert padded.seq_lens.tolist() == [5, 10, 3, 0]
    assert padded.query_start_loc.tolist() == [0, 1, 2, 5, 5]
    assert padded.other_groups[0].slot_mapping.tolist()[-4:] == [182, -1, -1, -1]
    local_context = step.context
    for name in ("positions", "slot_mapping", "seq_lens", "query_start_loc", "block_tables"):
        for mine, group in zip(local_context.groups, context.groups, strict=True):
            assert torch.equal(getattr(mine, name), getattr(group, name)), name
    assert local_context.logits_rows is not None
    assert local_context.logits_rows.tolist() == [0, 1, 4]
    assert local_context.prefill_start_loc is not None
    assert (local_context.num_decodes, local_context.prefill_start_loc.tolist()) == (2, [0, 3])


def test_tokens_that_are_being_sampled_come_from_the_device() -> None:
    ids, context = batch()
    source = np.array([3, 0, -1, -1, -1])
    sampled = torch.tensor([100, 101, 102, 103])
    rows = np.array([3, 0, 2])
    step = stage_inputs(ids, context, CPU, None, SampledTokenFeed(source, sampled), (rows,))
    assert step.token_ids.tolist() == [103, 100, 11, 12, 13]
    assert step.more[0].tolist() == [3, 0, 2]
    assert step.context.logits_rows is not None


@pytest.mark.parametrize("reqs", [0, 4])
def test_a_graphs_buffers_hold_the_padded_step(reqs: int) -> None:
    """Without sequences, of a graph in pieces, only what belongs to tokens is written."""
    ids, context = batch()
    to = BatchDescriptor(8, reqs, False)
    static = StaticInputBuffers(16, 6, [3, 3], CPU)
    static.token_ids.fill_(99)
    static.state_rows.fill_(9)
    context.states = StateStep(torch.tensor([3, 5, 4]), [], torch.empty((0, 2), dtype=torch.int64))
    static.fill(stage_inputs(ids, context, CPU, to), to)
    assert static.state_rows.tolist() == ([3, 5, 4, 0, 9, 9] if reqs else [9] * 6)
    assert static.token_ids.tolist() == [7, 8, 11, 12, 13, 0, 0, 0] + [99] * 8
    assert static.slots[1][:8].tolist() == [120, 141, 180, 181, 182, -1, -1, -1]
    assert static.tables[1][:3].tolist() == (
        [[7, 6, 0], [8, 9, 0], [11, 6, 0]] if reqs else [[0, 0, 0]] * 3
    )
    assert static.query_start_loc[:5].tolist() == ([0, 1, 2, 5, 5] if reqs else [0] * 5)
    assert static.nbytes == 16 * 8 * 4 + 2 * 6 * 3 * 4 + 6 * 4 + 7 * 4 + 6 * 8


@pytest.mark.parametrize(("tokens", "reqs", "seqs"), [(16, 0, 6), (5, 0, 2), (6, 6, 6), (1, 0, 1)])
def test_a_rehearsal_reads_no_block_that_its_tables_do_not_have(
    tokens: int, reqs: int, seqs: int
) -> None:
    """A graph in pieces for many tokens, beside tables for few and short sequences."""
    width = 3
    static = StaticInputBuffers(16, 6, [width, width], CPU)
    ids, context = static.dummy_inputs(BatchDescriptor(tokens, reqs, False))
    assert len(ids) == len(context.positions) == tokens
    assert context.block_tables.shape == (seqs, width)
    # A block holds one token at least.
    assert int(context.seq_lens.max()) <= width
    lengths = context.query_start_loc.diff()
    assert (lengths.sum(), lengths.min() >= 0, lengths.max() <= width) == (tokens, True, True)


class Sorted(LoraSlots):
    """Tiles, and nothing to run them."""

    max_adapters = 3

    def tile(self, rows: int) -> int:
        return 2 if rows < 12 else 4

    def pack(self, lora: Any) -> Any:
        raise NotImplementedError

    put = add = pack_embedding = embed = pack  # type: ignore[assignment]
    slot_by_row = add_experts = add_expert = pack  # type: ignore[assignment]


def test_rows_of_adapters_go_along_and_into_a_graphs_buffers() -> None:
    ids, context = batch()
    slots, to = Sorted(), BatchDescriptor(8, 4, True, True)
    lora = slots.sort([(2, np.array([0, 3, 4])), (1, np.array([1]))], 8, padded=True)
    static = StaticInputBuffers(16, 6, [3, 3], CPU, slots)
    _, rehearsed = static.dummy_inputs(to)
    step = stage_inputs(ids, context, CPU, to, lora=lora)
    static.fill(step, to)
    for rows in (
        rehearsed.lora_rows,
        step.context.lora_rows,
        step.padded.other_groups[0].lora_rows,
    ):
        assert rows is not None
        assert rows.count.tolist() == [3]
        assert rows.owners.tolist() == [2, 2, 1, -1, -1, -1]
        assert rows.order.tolist() == [0, 3, 4, -1, 1] + [-1] * 7
    assert static.dummy_inputs(BatchDescriptor(8, 4, True))[1].lora_rows is None
    largest = static.dummy_inputs(BatchDescriptor(16, 6, False, True))[1].lora_rows
    assert largest is not None
    assert (len(largest.order), len(largest.owners), largest.tile) == (24, 6, 4)
    assert largest.count.tolist() == [0]
    assert static.nbytes > StaticInputBuffers(16, 6, [3, 3], CPU).nbytes
