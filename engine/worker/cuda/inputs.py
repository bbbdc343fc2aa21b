"""A step's inputs on the device: copied as they are, or into buffers that graphs read."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from engine.models.context import AttentionContext
from engine.worker.cuda.dispatcher import BatchDescriptor

_FIELDS = (
    "positions", "slot_mapping", "block_tables", "seq_lens", "query_start_loc", "logits_rows",
    "sequence_rows",
)  # fmt: skip


def to_device(context: AttentionContext, device: torch.device) -> AttentionContext:
    """A copy on the device; tensors that KV cache groups share are copied once."""
    made: dict[int, Tensor] = {}

    def move(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in made:
            made[id(tensor)] = tensor.to(device, non_blocking=True)
        return made[id(tensor)]

    def moved(one: AttentionContext) -> AttentionContext:
        fields: dict[str, Any] = {name: move(getattr(one, name)) for name in _FIELDS}
        return dataclasses.replace(one, **fields, others=tuple(moved(o) for o in one.others))

    return moved(context)


class StaticInputs:
    """Buffers at fixed addresses, filled before a graph is replayed.

    Args:
        max_tokens: of the largest graph.
        max_seqs: sequences of a batch.
        max_blocks: of one sequence.
        groups: KV cache groups.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, max_blocks: int, groups: int, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids = zeros(max_tokens, dtype=torch.int64)
        self.positions = zeros(max_tokens, dtype=torch.int64)
        self.slots = [zeros(max_tokens, dtype=torch.int64).fill_(-1) for _ in range(groups)]
        self.tables = [zeros(max_seqs, max_blocks, dtype=torch.int32) for _ in range(groups)]
        self.seq_lens = zeros(max_seqs, dtype=torch.int32)
        self.query_start_loc = zeros(max_seqs + 1, dtype=torch.int32)

    def fill(self, token_ids: Tensor, context: AttentionContext, to: BatchDescriptor) -> None:
        """Copy a batch in; tokens that pad it write no keys, sequences that do have no tokens."""
        count, size = len(token_ids), to.num_tokens
        self.token_ids[:count].copy_(token_ids, non_blocking=True)
        self.token_ids[count:size].zero_()
        self.positions[:count].copy_(context.positions, non_blocking=True)
        self.positions[count:size].zero_()
        for slots, group in zip(self.slots, context.groups, strict=True):
            slots[:count].copy_(group.slot_mapping, non_blocking=True)
            slots[count:size].fill_(-1)
        if to.num_reqs:
            self._fill_sequences(context, count, to.num_reqs)

    def _fill_sequences(self, context: AttentionContext, tokens: int, size: int) -> None:
        count = len(context.seq_lens)
        for table, group in zip(self.tables, context.groups, strict=True):
            width = group.block_tables.shape[1]
            table[:count, :width].copy_(group.block_tables, non_blocking=True)
        self.seq_lens[:count].copy_(context.seq_lens, non_blocking=True)
        self.seq_lens[count:size].zero_()
        self.query_start_loc[: count + 1].copy_(context.query_start_loc, non_blocking=True)
        self.query_start_loc[count + 1 : size + 1].fill_(tokens)

    def rehearse(self, of: BatchDescriptor) -> None:
        """Fill in a batch that is harmless to run: one token a sequence, nothing written."""
        self.token_ids.zero_()
        self.positions.zero_()
        for slots in self.slots:
            slots.fill_(-1)
        for table in self.tables:
            table.zero_()
        reqs = max(1, of.num_reqs)
        self.seq_lens.fill_(max(1, of.num_tokens // reqs))
        starts = torch.arange(reqs + 1, dtype=torch.int32) * (of.num_tokens // reqs)
        starts[-1] = of.num_tokens
        self.query_start_loc[: reqs + 1].copy_(starts)

    def views(self, of: BatchDescriptor) -> tuple[Tensor, AttentionContext]:
        """Token ids and context of a batch of that size, as views of the buffers."""
        size, reqs = of.num_tokens, max(1, of.num_reqs)
        contexts = [
            AttentionContext(
                positions=self.positions[:size],
                slot_mapping=slots[:size],
                block_tables=table[:reqs],
                seq_lens=self.seq_lens[:reqs],
                query_start_loc=self.query_start_loc[: reqs + 1],
            )
            for slots, table in zip(self.slots, self.tables, strict=True)
        ]
        contexts[0].others = tuple(contexts[1:])
        return self.token_ids[:size], contexts[0]
