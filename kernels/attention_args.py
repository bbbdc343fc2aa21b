"""The arguments of one call of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """Which blocks of tokens a query sees: those near its own, and every `stride`-th one.

    A query of head h in block i sees, of its own token and those before it, the blocks j with
    i - j < local or (j + h * head_step + 1) % stride == 0.

    Attributes:
        block: tokens of a block.
        local: blocks, the query's own included.
        stride: in blocks.
        head_step: blocks that the pattern moves on by from head to head; 0: all heads see the same.
    """

    block: int
    local: int
    stride: int
    head_step: int

    def is_masked(self, queries: Tensor, keys: Tensor, heads: int) -> Tensor:
        """bool [heads, queries, keys], by the positions int64 [queries], [keys]."""
        i, j = queries[:, None] // self.block, keys[None, :] // self.block
        moved = torch.arange(heads, device=keys.device)[:, None] * self.head_step
        strided = (keys // self.block + moved + 1) % self.stride == 0
        return ~((i - j < self.local) | strided[:, None, :])


@dataclass(slots=True)
class AttentionArgs:
    """Ragged queries over paged keys and values, and how scores are made.

    S sequences of T queries in all; Hq query heads share Hk key/value heads of D values.

    A query sees itself and the `sliding_window` - 1 tokens before it (0: all), and with
    `visible_ends` tokens after it. Scores are
    scale * q.k, then soft_cap * tanh(score / soft_cap), then + slope of the head * (key position -
    query position).

    Attributes:
        q: [T, Hq, D] of float32, bfloat16 or float16, any stride between tokens.
        key_cache, value_cache: [num_blocks, Hk, block_size, D], contiguous.
        block_tables: int32 [S, max_blocks]: which blocks a sequence's tokens are in.
        seq_lens: int32 [S]: tokens in the cache, those of this step included.
        query_start_loc: int32 [S + 1]: sequence s owns the queries [query_start_loc[s],
            query_start_loc[s + 1]), which are its last tokens.
        scale: of the products of queries and keys.
        sliding_window: tokens; 0: none.
        soft_cap: > 0; 0: none.
        alibi_slopes: float32 [Hq], or None.
        sinks: float32 [Hq], logits that take part in the softmax and bring no value; or None.
        out: where results go, contiguous and else like q; None: a new tensor.
        key_scales, value_scales: float32 [num_blocks, Hk, block_size] of int8 caches; of fp8 caches
            [Hk], or None for 1; else None.
        sparse: blocks that queries see; None: all.
        visible_ends: int32 [T], the position after the last token that each query sees: after its
            own one or further, within the sequence, not descending in it; None: after its own.
        round_inputs: let queries, and the weights of values, be rounded to bfloat16, where that is
            faster.
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
    sinks: Tensor | None = None
    out: Tensor | None = None
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    sparse: BlockSparse | None = None
    visible_ends: Tensor | None = None
    round_inputs: bool = False

    def new_out(self) -> Tensor:
        """Room for results."""
        return torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)

    def check_causal(self, name: str) -> None:
        """Raise ValueError unless queries see all tokens up to their own, and none after it."""
        if self.sparse is not None:
            raise ValueError(f"{name} does no block-sparse attention")
        if self.visible_ends is not None:
            raise ValueError(f"{name} does no bidirectional attention")


@dataclass(slots=True, kw_only=True)
class MlaArgs:
    """Ragged queries over paged latents: one vector a token is the key and the value of all heads.

    Attributes:
        q: [T, Hq, D] of float32, bfloat16 or float16, any stride between tokens.
        cache: [num_blocks, 1, block_size, D], contiguous.
        latent: so many of a token's D values, the last ones, are its value. What is rotated comes
            first, as in keys of any other attention: one rotation does for all.
        scales: float32 [num_blocks, 1, block_size] of an int8 cache; of fp8 caches float32 [1], or
            None for 1; else None.
        out: where results go, contiguous [T, Hq, latent] of q's dtype; None: a new tensor.
        block_tables, seq_lens, query_start_loc, scale, round_inputs: as of `AttentionArgs`.
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

    def new_out(self) -> Tensor:
        """Room for results."""
        q = self.q
        return torch.empty((*q.shape[:2], self.latent), dtype=q.dtype, device=q.device)

    def of_whole_values(self) -> AttentionArgs:
        """The same with all D values of a token as its value."""
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
        )
