"""Keys and values of a batch, gathered from their pages for backends without paging."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_args import AttentionArgs


@dataclass(frozen=True, slots=True)
class GatheredKV:
    """The tokens of all sequences, one sequence after the other.

    Attributes:
        keys, values: [L, Hk, D], L the sum of the lengths.
        lengths, queries: numbers of tokens and of queries of each sequence.
    """

    keys: Tensor
    values: Tensor
    lengths: list[int]
    queries: list[int]


def gather_kv(args: AttentionArgs) -> GatheredKV:
    """Gather keys and values in the queries' dtype; waits for the lengths."""
    key_cache, value_cache, dtype = args.key_cache, args.value_cache, args.q.dtype
    page = key_cache.shape[2]
    lengths, starts = args.seq_lens.tolist(), args.query_start_loc.tolist()
    blocks, offsets = [], []
    for table, length in zip(args.block_tables, lengths, strict=True):
        token_index = torch.arange(length, device=table.device)
        blocks.append(table[token_index // page].long())
        offsets.append(token_index % page)
    if not blocks:
        empty = key_cache.new_empty((0, key_cache.shape[1], key_cache.shape[3]), dtype=dtype)
        return GatheredKV(empty, empty, [], [])
    indexes = torch.cat(blocks), torch.cat(offsets)
    return GatheredKV(
        key_cache[indexes[0], :, indexes[1]].to(dtype),
        value_cache[indexes[0], :, indexes[1]].to(dtype),
        lengths,
        [end - begin for begin, end in itertools.pairwise(starts)],
    )


def raise_unsupported(name: str, **arguments: object) -> None:
    """Raise ValueError if any of the named features is requested."""
    for what, value in arguments.items():
        if value is not None and value != 0:
            raise ValueError(f"{name} doesn't do {what}")
