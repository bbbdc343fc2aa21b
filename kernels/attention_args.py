"""The arguments of an attention call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.ranks import RankGroup


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """Block-sparse attention: a query attends to the blocks near its own, and every `stride`-th.

    A query of head h in block i attends to the tokens up to its own in the blocks j with
    i - j < local or (j + h * head_step + 1) % stride == 0.

    Attributes:
        block: tokens per block.
        local: number of local blocks, including the query's own.
        stride: in blocks.
        head_step: shift of the pattern between heads, in blocks; 0 if all heads have the same.
    """

    block: int
    local: int
    stride: int
    head_step: int

    def is_masked(self, queries: Tensor, keys: Tensor, heads: int) -> Tensor:
        """Return bool [heads, queries, keys] for the positions int64 [queries] and [keys]."""
        i, j = queries[:, None] // self.block, keys[None, :] // self.block
        moved = torch.arange(heads, device=keys.device)[:, None] * self.head_step
        strided = (keys // self.block + moved + 1) % self.stride == 0
        return ~((i - j < self.local) | strided[:, None, :])


@dataclass(slots=True)
class AttentionArgs:
    """Ragged queries over paged keys and values, and the computation of scores.

    There are S sequences with T queries in total; Hq query heads share Hk KV heads of size D.

    A query attends to itself and the `sliding_window` - 1 tokens before it (all if 0), and with
    `visible_ends` to tokens after it. Scores are scale * q.k, then soft_cap * tanh(score /
    soft_cap), then + the head's slope * (key position - query position), then + the head's bias by
    distance.

    Attributes:
        q: [T, Hq, D] of float32, bfloat16 or float16, with any stride between tokens.
        key_cache, value_cache: [num_blocks, Hk, block_size, D], contiguous.
        block_tables: int32 [S, max_blocks], the blocks of each sequence's tokens.
        seq_lens: int32 [S], tokens in the cache, including those of this step.
        query_start_loc: int32 [S + 1]; sequence s has the queries [query_start_loc[s],
        query_start_loc[s + 1]), which are its last tokens.
        scale: the factor of q.k.
        sliding_window: in tokens; 0 for none.
        soft_cap: positive; 0 for none.
        alibi_slopes: float32 [Hq], or None.
        distance_bias: float32 [Hq, n], added to the score of a key by how many tokens it is before
            the query; the last entry for all farther keys; or None.
        sinks: float32 [Hq], logits that are added to the softmax without a value; or None.
        out: the results' tensor, contiguous with q's shape and dtype; None for a new one.
        key_scales, value_scales: float32 [num_blocks, Hk, block_size] of int8 caches; of fp8 caches
            [Hk], or None for 1; else None.
        sparse: the block-sparse pattern; None for dense attention.
        visible_ends: int32 [T], the position after the last token that each query attends to: at
        least the one after its own, within the sequence and not descending; None for its own.
        round_inputs: allow rounding queries and attention weights to bfloat16 where it is faster.
        ranks: a group of ranks that all have these queries, and in their caches each some tokens of
            a block: rank r the r-th `block_size` of them; None if all are in this one's caches.
            `block_size` must then be a multiple of 128.
    """

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scale: float
    sliding_window: int = 0
    soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    distance_bias: Tensor | None = None
    sinks: Tensor | None = None
    out: Tensor | None = None
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    sparse: BlockSparse | None = None
    visible_ends: Tensor | None = None
    round_inputs: bool = False
    ranks: RankGroup | None = None

    def new_out(self) -> Tensor:
        """Return a tensor for the results."""
        return torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)

    def check_causal(self, name: str, *, takes_spans: bool = False) -> None:
        """Raise ValueError unless queries attend to exactly the tokens up to their own, or with
        `takes_spans` to later ones, and none has a bias by distance.
        """
        if self.distance_bias is not None:
            raise ValueError(f"{name} does no bias by distance")
        if self.sparse is not None:
            raise ValueError(f"{name} does no block-sparse attention")
        if self.visible_ends is not None and not takes_spans:
            raise ValueError(f"{name} does no bidirectional attention")


@dataclass(slots=True, kw_only=True)
class MlaArgs:
    """Ragged queries over paged latents: a token's vector is the key and value of all heads.

    Attributes:
        q: [T, Hq, D] of float32, bfloat16 or float16, with any stride between tokens.
        cache: [num_blocks, 1, block_size, D], contiguous.
        latent: the number of values at the end of a token's D that are its value. The rotated
        part comes first, as in the keys of other attention, so that they share one rotation.
        scales: float32 [num_blocks, 1, block_size] for an int8 cache; for fp8 caches float32 [1],
        or None for 1; else None.
        out: the results' tensor, contiguous [T, Hq, latent] of q's dtype; None for a new one.
        block_tables, seq_lens, query_start_loc, scale, round_inputs, ranks: as in `AttentionArgs`.
    """

    q: Tensor
    cache: Tensor
    latent: int
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scale: float
    scales: Tensor | None = None
    out: Tensor | None = None
    round_inputs: bool = False
    ranks: RankGroup | None = None

    def new_out(self) -> Tensor:
        """Return a tensor for the results."""
        q = self.q
        return torch.empty((*q.shape[:2], self.latent), dtype=q.dtype, device=q.device)

    def of_whole_values(self) -> AttentionArgs:
        """Return the same arguments with all D values of a token as its value."""
        return AttentionArgs(
            self.q,
            self.cache,
            self.cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            self.scale,
            key_scales=self.scales,
            value_scales=self.scales,
            round_inputs=self.round_inputs,
            ranks=self.ranks,
        )
