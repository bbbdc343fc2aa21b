"""Ragged batches over randomly scattered KV blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Batch:
    """The arguments of one call of paged attention."""

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scale: float

    def arguments(self) -> dict[str, Any]:
        """As keywords."""
        return dict(vars(self))


def make_batch(
    sequences: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
    strided: bool = False,
) -> Batch:
    """Sequences given as (queries, length). What no sequence owns is NaN, so that reading it shows.

    With `strided`, q is a view into a wider row, as it comes out of a fused QKV projection.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(queries for queries, _ in sequences)
    counts = [-(-length // block_size) for _, length in sequences]
    total, max_blocks = sum(counts) + 3, max([*counts, 1])
    order = torch.randperm(total, generator=generator).to(torch.int32)
    shape = (total, kv_heads, block_size, size)
    caches = [torch.full(shape, float("nan"), dtype=cache_dtype or dtype) for _ in range(2)]
    tables = torch.full((len(sequences), max_blocks), -1, dtype=torch.int32)
    num_used = 0
    for row, ((_, length), count) in enumerate(zip(sequences, counts)):
        tables[row, :count] = order[num_used : num_used + count]
        num_used += count
        positions = torch.arange(length)
        blocks, offsets = tables[row, positions // block_size].long(), positions % block_size
        for cache in caches:
            values = torch.randn((length, kv_heads, size), generator=generator)
            cache[blocks, :, offsets] = values.to(cache.dtype)
    width = heads + (2 * kv_heads if strided else 0)
    q = torch.randn((tokens, width, size), generator=generator).to(dtype)[:, :heads]
    starts = torch.tensor([0, *(queries for queries, _ in sequences)]).cumsum(0)
    return Batch(
        q=q,
        key_cache=caches[0],
        value_cache=caches[1],
        block_tables=tables,
        seq_lens=torch.tensor([length for _, length in sequences], dtype=torch.int32),
        query_start_loc=starts.to(torch.int32),
        scale=size**-0.5,
    )
