"""Attention over latents: one vector a token is key and value of all heads at once.

Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2") with its projections of keys and
values taken into the queries and behind the results: a key is a latent and a rotated part beside
it, 512 and 64 values in DeepSeek's models; the latent alone is the value. A block is read once for
all heads of a tile, and for both products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_vector, describe, token_stride
from kernels.triton.attention.kernel import reduce_kernel
from kernels.triton.attention.shares import SPLIT_KEYS, plan, share_of, split_at
from kernels.triton.attention.tile import LOG2E, NOTHING
from kernels.triton.attention.tiles import (
    MOST_SPLITS,
    SHARED_8,
    Tile,
    most_splits,
    programs_for,
)
from kernels.triton.attention.walk import put_state
from kernels.triton.launch import INTERPRETED, Target, launch, target_of

MOST_LATENT, MOST_ROTATED = 512, 128
"""Values of a latent and of the part beside it that a tile has registers for."""


@triton.jit(
    do_not_specialize=("num_seqs", "table_stride", "slots", "most_splits"),
    do_not_specialize_on_alignment=("block_tables", "seq_lens", "query_start_loc"),
)
def latent_attention_kernel(
    partial, lse, q, cache, block_tables, seq_lens, query_start_loc,
    q_stride, table_stride, num_seqs, scale, slots, most_splits,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A query with ROWS of its heads, over splits of the keys that it sees.

    Grid (programs, blocks of heads). Keys are shared out as in `split_attention_kernel`, one query
    a tile; states go to partial [T, HEADS, slots, LATENT] and lse [T, HEADS, slots].
    """
    SIZE: tl.constexpr = LATENT + ROTATED
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = head < HEADS
    dims = tl.arange(0, LATENT)
    beside = LATENT + tl.arange(0, ROTATED)
    seq, before, place, end = share_of(
        seq_lens, query_start_loc, num_seqs, 0, most_splits, 1, KEYS, False
    )
    while before + place < end:
        begin = tl.load(query_start_loc + seq)
        count = tl.load(query_start_loc + seq + 1) - begin
        length = tl.load(seq_lens + seq)
        tiles, blocks, first_block, width, first_split, splits = plan(
            length, count, 0, most_splits, 1, KEYS, False
        )
        if place >= tiles * blocks:
            before += tiles * blocks
            place = tl.zeros_like(place)
            seq += 1
        else:
            tile = place // blocks
            slot, place = split_at(place, tile, blocks, first_block, width, first_split, splits)
            if (slot < splits) & (before + place < end):
                token = (begin + tile).to(tl.int64)
                seen = length - count + tile + 1
                table = block_tables + seq.to(tl.int64) * table_stride
                rows = q + token * q_stride + (head * SIZE)[:, None]
                low_q = tl.load(rows + dims[None, :], mask=valid[:, None], other=0.0)
                high_q = tl.load(rows + beside[None, :], mask=valid[:, None], other=0.0)
                if UPCAST:
                    low_q = low_q.to(tl.float32)
                    high_q = high_q.to(tl.float32)
                best = tl.full((ROWS,), NOTHING, tl.float32)
                total = tl.zeros((ROWS,), tl.float32)
                accumulated = tl.zeros((ROWS, LATENT), tl.float32)
                first = slot * width * KEYS
                for start in tl.range(first, tl.minimum(first + width * KEYS, seen), KEYS):
                    offsets = start + tl.arange(0, KEYS)
                    there = offsets < seen
                    page = tl.load(table + offsets // PAGE, mask=there, other=0).to(tl.int64)
                    at = cache + ((page * PAGE + offsets % PAGE) * SIZE)[:, None]
                    low = tl.load(at + dims[None, :], mask=there[:, None], other=0.0)
                    high = tl.load(at + beside[None, :], mask=there[:, None], other=0.0)
                    if UPCAST:
                        low = low.to(tl.float32)
                        high = high.to(tl.float32)
                    scores = tl.dot(low_q, tl.trans(low))
                    scores = tl.dot(high_q, tl.trans(high), scores)
                    scores = tl.where(there[None, :], scores * (scale * LOG2E), float("-inf"))
                    higher = tl.maximum(best, tl.max(scores, 1))
                    weights = tl.exp2(scores - higher[:, None])
                    shrink = tl.exp2(best - higher)
                    total = total * shrink + tl.sum(weights, 1)
                    accumulated *= shrink[:, None]
                    accumulated = tl.dot(weights.to(low.dtype), low, accumulated)
                    best = higher
                put_state(
                    partial, lse, accumulated, best, total, (token * HEADS + head) * slots + slot,
                    0, lse, valid[:, None], valid, LATENT, 0, True,
                )  # fmt: skip
                place += 1


def latent_tile(target: Target, heads: int) -> Tile:
    """Of ROWS heads and KEYS keys: with more of either, sums of 512 values don't fit registers."""
    large = target.shared > SHARED_8
    rows = 32 if heads > 16 and large else 16
    if INTERPRETED:
        return Tile(rows, 16, 1, 1)
    stages = 5 if rows == 16 else 7
    return Tile(rows, 32, rows // 4, stages, programs=2 if large and rows == 16 else 1)


def latent_attention(
    q: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor,
    scale: float, latent: int, *, out: Tensor | None = None, programs: int | None = None,
) -> Tensor:  # fmt: skip
    """[T, Hq, latent]: causal attention of ragged queries over paged latents.

    q [T, Hq, D] of bfloat16 or float16, any stride between tokens; cache [num_blocks, block_size,
    D], contiguous, of q's dtype: of D values the first `latent` are the value too. Both it and what
    is left are powers of two, D at most 640. Tables and lengths as in `AttentionArgs`. `programs`:
    among how many the keys of a batch are shared for each block of heads; None: by the device's
    size. Needs no word from the device, and a decoding row's result is the same in every batch.
    """
    tokens, heads, _ = q.shape
    rotated = _check(q, cache, block_tables, seq_lens, query_start_loc, latent)
    sequences, page = len(block_tables), cache.shape[1]
    if out is None:
        out = torch.empty((tokens, heads, latent), dtype=q.dtype, device=q.device)
    elif out.shape != (tokens, heads, latent) or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out {describe(out)} must be contiguous {[tokens, heads, latent]}")
    target = target_of(q.device)
    tile = latent_tile(target, heads)
    head_blocks = triton.cdiv(heads, tile.rows)
    splits = most_splits(target, head_blocks)
    slots = max(1, min(splits, triton.cdiv(block_tables.shape[1] * page, SPLIT_KEYS.value)))
    partial = torch.empty((tokens, heads, slots, latent), dtype=torch.float32, device=q.device)
    sums = torch.empty((tokens, heads, slots), dtype=torch.float32, device=q.device)
    programs = (programs or programs_for(target, tile, head_blocks)) if tokens else 0
    lengths = (seq_lens, query_start_loc)
    launch(
        latent_attention_kernel, (programs, head_blocks), partial, sums, q, cache, block_tables,
        *lengths, token_stride(q), block_tables.stride(0), sequences, scale, slots, splits,
        HEADS=heads, LATENT=latent, ROTATED=rotated, PAGE=page, ROWS=tile.rows, KEYS=tile.keys,
        UPCAST=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    launch(
        reduce_kernel, (tokens * heads,), out, None, partial, sums, None, *lengths, sequences, 0,
        slots, splits, HEADS=heads, HEAD_SIZE=latent, PADDED=latent, MOST=MOST_SPLITS,
        KEYS=tile.keys, WINDOW=False, SINKS=False, WRITE_LSE=False, num_warps=8,
    )  # fmt: skip
    return out


def _check(
    q: Tensor, cache: Tensor, tables: Tensor, seq_lens: Tensor, starts: Tensor, latent: int
) -> int:
    """Raise ValueError where shapes or dtypes don't fit; the values beside a latent."""
    size = q.shape[2]
    rotated = size - latent
    for name, value, most in (
        ("latent", latent, MOST_LATENT), ("rotated part", rotated, MOST_ROTATED),
    ):  # fmt: skip
        if not 16 <= value <= most or value & (value - 1):
            raise ValueError(f"a {name} of {value} isn't a power of two from 16 to {most}")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q {describe(q)} must be float16 or bfloat16")
    if cache.dim() != 3 or cache.shape[2] != size or not cache.is_contiguous():
        raise ValueError(f"a cache {describe(cache)} doesn't fit heads of {size}")
    if cache.dtype != q.dtype:
        raise ValueError(f"a cache {describe(cache)} must have the dtype of q {describe(q)}")
    if tables.dim() != 2 or tables.dtype != torch.int32 or not tables.is_contiguous():
        raise ValueError("block_tables must be contiguous int32")
    check_vector("seq_lens", seq_lens, len(tables), torch.int32)
    check_vector("query_start_loc", starts, len(tables) + 1, torch.int32)
    return rotated
