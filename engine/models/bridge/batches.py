"""Some of a step's sequences as a batch of their own."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from engine.models.context import AttentionContext


def token_rows(starts: list[int], counts: list[int]) -> Tensor:
    """int64: the rows [start, start + count) of each sequence, one after another."""
    parts = [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
    return torch.cat(parts)


def take(
    context: AttentionContext, sequences: list[int], starts: list[int], counts: list[int]
) -> AttentionContext:
    """The context of some tokens: of each sequence `count` from row `start` on.

    A sequence ends with the last of them for now: its later tokens aren't there yet.
    """
    host, device = context.host or context, context.positions.device
    rows = token_rows(starts, counts).to(device)
    ends = torch.tensor([start + count - 1 for start, count in zip(starts, counts, strict=True)])
    loc = torch.zeros(len(counts) + 1, dtype=torch.int32)
    loc[1:] = torch.tensor(counts).cumsum(0)
    loc, lens = loc.to(device), (host.positions[ends] + 1).to(torch.int32).to(device)
    chosen = torch.tensor(sequences).to(device)

    def part(group: AttentionContext) -> AttentionContext:
        return dataclasses.replace(
            group,
            positions=group.positions[rows],
            slot_mapping=group.slot_mapping[rows],
            block_tables=group.block_tables[chosen].contiguous(),
            seq_lens=lens,
            query_start_loc=loc,
            logits_rows=None,
            others=(),
            host=None,
            adapters=group.adapters.among(rows),
        )

    first, *others = (part(group) for group in context.groups)
    return dataclasses.replace(first, others=tuple(others))
