"""Attention over latents: one vector per token is key and value of all heads.

Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"), with the key projections absorbed
into the queries and the value projections applied to the results. A key is a rotated part followed
by a latent (64 and 512 values in DeepSeek's models); the value is the latent alone. A block is read
once for all heads of a tile and for both products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_args import MlaArgs
from kernels.tensors import check_vector, describe, token_stride
from kernels.triton.attention.kernels import reduce_kernel
from kernels.triton.attention.paged import DECODE_QUERIES, check_cache_scales
from kernels.triton.attention.tile import (
    LOG2E,
    NEG_INF,
    SPLIT_KEYS,
    find_sequence,
    kv_offsets,
    load_tile,
    plan,
    program_work_range,
    split_at,
    to_operand,
)
from kernels.triton.attention.tile_sizes import (
    MAX_SPLITS,
    SHARED_8,
    Tile,
    max_splits,
    programs_for,
    prompt_splits,
)
from kernels.triton.attention.walk import store_state
from kernels.triton.fp8 import KINDS
from kernels.triton.launch import INTERPRETED, Target, launch, target_of


@triton.jit
def load_latent_queries(
    q, q_stride, begin, count, length, first,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr,
    PADDED: tl.constexpr, PADDED_ROTATED: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Load the program's heads of a sequence's queries from `first` on.

    A row is a (query, head of the block of GROUP). Returns (the part multiplied by latents [ROWS,
    PADDED], the rotated part [ROWS, PADDED_ROTATED], positions, tokens, heads, mask of valid rows).
    """
    rows = tl.arange(0, ROWS)
    query = first + rows // GROUP
    head = tl.program_id(1) * GROUP + rows % GROUP
    valid = (rows < ROWS // GROUP * GROUP) & (query < count) & (head < HEADS)
    token = (begin + query).to(tl.int64)
    row_offsets = token * q_stride + head * (LATENT + ROTATED)
    low = load_tile(q, row_offsets + ROTATED, valid, tl.arange(0, PADDED), LATENT, True)
    high = load_tile(q, row_offsets, valid, tl.arange(0, PADDED_ROTATED), ROTATED, True)
    if UPCAST:
        low = low.to(tl.float32)
        high = high.to(tl.float32)
    return low, high, length - count + query, token, head, valid


@triton.jit
def walk_latents(
    q, q_rotated, position, start, stop, cache, table, scales, scale,
    LATENT: tl.constexpr, ROTATED: tl.constexpr, PADDED: tl.constexpr, PADDED_ROTATED: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    FP8: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [start, stop); a row sees keys up to its position.

    `start` is a multiple of KEYS. Returns (accumulated, best, total): the weighted sum of latents,
    the maximum score to base 2, and the sum of the weights relative to it.
    """
    dims = tl.arange(0, PADDED)
    rotated_dims = tl.arange(0, PADDED_ROTATED)
    best = tl.full((ROWS,), NEG_INF, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    accumulated = tl.zeros((ROWS, PADDED), tl.float32)
    for first in tl.range(start, stop, KEYS):
        offsets = first + tl.arange(0, KEYS)
        in_range = offsets < stop
        token = kv_offsets(table, first, offsets, in_range, 0, 1, PAGE, KEYS, True)
        row_offsets = token * (LATENT + ROTATED)
        latents = load_tile(cache, row_offsets + ROTATED, in_range, dims, LATENT, True)
        rotated = load_tile(cache, row_offsets, in_range, rotated_dims, ROTATED, True)
        latents = to_operand(latents, q.dtype, FP8, UPCAST)
        rotated = to_operand(rotated, q.dtype, FP8, UPCAST)
        scores = tl.dot(q, tl.trans(latents), input_precision=PRECISION)
        scores = tl.dot(q_rotated, tl.trans(rotated), scores, input_precision=PRECISION)
        if TOKEN_SCALES:
            size = tl.load(scales + token, mask=in_range, other=0.0)
            scores *= size[None, :]
        visible = in_range[None, :] & (offsets[None, :] <= position[:, None])
        scores = tl.where(visible, scores * (scale * LOG2E), float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weights, 1)
        if TOKEN_SCALES:
            weights *= size[None, :]
        accumulated *= shrink[:, None]
        accumulated = tl.dot(
            weights.to(latents.dtype), latents, accumulated, input_precision=PRECISION
        )
        best = higher
    return accumulated, best, total


@triton.jit(
    do_not_specialize=("num_seqs", "table_stride"),
    do_not_specialize_on_alignment=("block_tables", "seq_lens", "query_start_loc"),
)
def latent_attention_kernel(
    out, q, cache, block_tables, seq_lens, query_start_loc, scales,
    q_stride, table_stride, num_seqs, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr,
    PADDED: tl.constexpr, PADDED_ROTATED: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SCALES: tl.constexpr, TOKEN_SCALES: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries, with GROUP of their heads, over all keys that they see.

    Grid (tiles, blocks of heads). SCALES: whether the cache has a scale. Every block of keys is
    masked, so that a row's arithmetic doesn't depend on where the tile's other rows end.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    # The last tiles of a prompt have the most keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = find_sequence(query_start_loc, tile, num_seqs, QUERIES)
    begin = tl.load(query_start_loc + seq)
    count = tl.load(query_start_loc + seq + 1) - begin
    first = (tile - (begin // QUERIES + seq)) * QUERIES
    if first >= count:
        return
    if SCALES:
        scale *= tl.load(scales)
    length = tl.load(seq_lens + seq)
    low, high, position, token, head, valid = load_latent_queries(
        q, q_stride, begin, count, length, first,
        HEADS, GROUP, LATENT, ROTATED, PADDED, PADDED_ROTATED, ROWS, UPCAST,
    )  # fmt: skip
    stop = tl.minimum(length - count + first + QUERIES, length)
    accumulated, best, total = walk_latents(
        low, high, position, 0, stop, cache, block_tables + seq.to(tl.int64) * table_stride, scales,
        scale, LATENT, ROTATED, PADDED, PADDED_ROTATED, PAGE, ROWS, KEYS, TOKEN_SCALES, FP8,
        PRECISION, UPCAST,
    )  # fmt: skip
    inside = valid[:, None] & (tl.arange(0, PADDED) < LATENT)[None, :]
    store_state(
        out, scales, accumulated, best, total, token * HEADS + head, 0, scales, inside, valid,
        LATENT, SCALES, False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=("num_seqs", "table_stride", "slots", "max_splits"),
    do_not_specialize_on_alignment=("block_tables", "seq_lens", "query_start_loc"),
)
def split_latent_attention_kernel(
    partial, lse, q, cache, block_tables, seq_lens, query_start_loc, scales,
    q_stride, table_stride, num_seqs, scale, slots, max_splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr,
    PADDED: tl.constexpr, PADDED_ROTATED: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SCALES: tl.constexpr, TOKEN_SCALES: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Like `latent_attention_kernel`, but the keys of each sequence are split.

    Grid (programs, blocks of heads). Keys are shared out as in `split_attention_kernel`; states are
    written to partial [T, HEADS, slots, LATENT] and lse [T, HEADS, slots].
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    if SCALES:
        scale *= tl.load(scales)
    seq, preceding_work, work_offset, end = program_work_range(
        seq_lens, query_start_loc, num_seqs, 0, max_splits, QUERIES, KEYS, False
    )
    while preceding_work + work_offset < end:
        begin = tl.load(query_start_loc + seq)
        count = tl.load(query_start_loc + seq + 1) - begin
        length = tl.load(seq_lens + seq)
        tiles, blocks, first_block, width, first_split, splits = plan(
            length, count, 0, max_splits, QUERIES, KEYS, False
        )
        if work_offset >= tiles * blocks:
            preceding_work += tiles * blocks
            work_offset = tl.zeros_like(work_offset)
            seq += 1
        else:
            tile = work_offset // blocks
            slot, work_offset = split_at(
                work_offset, tile, blocks, first_block, width, first_split, splits
            )
            if (slot < splits) & (preceding_work + work_offset < end):
                low, high, position, token, head, valid = load_latent_queries(
                    q, q_stride, begin, count, length, tile * QUERIES,
                    HEADS, GROUP, LATENT, ROTATED, PADDED, PADDED_ROTATED, ROWS, UPCAST,
                )  # fmt: skip
                seen = tl.minimum(length - count + (tile + 1) * QUERIES, length)
                start = slot * width * KEYS
                accumulated, best, total = walk_latents(
                    low, high, position, start, tl.minimum(start + width * KEYS, seen), cache,
                    block_tables + seq.to(tl.int64) * table_stride, scales, scale,
                    LATENT, ROTATED, PADDED, PADDED_ROTATED, PAGE, ROWS, KEYS, TOKEN_SCALES, FP8,
                    PRECISION, UPCAST,
                )  # fmt: skip
                inside = valid[:, None] & (tl.arange(0, PADDED) < LATENT)[None, :]
                store_state(
                    partial, lse, accumulated, best, total, (token * HEADS + head) * slots + slot,
                    0, scales, inside, valid, LATENT, SCALES, True,
                )  # fmt: skip
                work_offset += 1


MAX_LATENT, MAX_ROTATED = 512, 128
"""The largest latent and the largest rotated part for which a tile has registers."""
MAX_STATES = 2048
"""Maximum of splits * heads * queries of a decoding sequence, and of splits * heads of a prompt.
Each is a float32 latent, so 256 decoding sequences have at most a gigabyte of them.
"""


def latent_tile(target: Target, rows: int, itemsize: int = 2) -> Tile:
    """Return the tile for this many rows of (query, head). More rows or keys don't fit the
    registers beside sums of 512 values.
    """
    large = target.shared > SHARED_8
    rows = 16 if rows <= 16 or not large else 32
    if INTERPRETED:
        return Tile(rows, 16, 1, 1)
    if itemsize == 4:
        return Tile(16, 16, 8, 1)
    if target.gfx:
        return Tile(rows, 16, 8, 1)
    stages = 5 if rows == 16 else 7
    return Tile(rows, 32, rows // 4, stages, programs=2 if large and rows == 16 else 1)


def latent_attention(
    args: MlaArgs, *, programs: int | None = None, invariant: bool = False
) -> Tensor:
    """See `KernelSet.mla_attention`: [T, Hq, latent], contiguous.

    A latent has at most 512 values, the rotated part 128. Caches may be int8 with a scale per
    token, or float8_e4m3fn or float8_e5m2 with one scale or none. `programs`, `invariant` and the
    bitwise guarantees are those of `paged_attention`. Doesn't wait for the device.
    """
    q, latent, page = args.q, args.latent, args.cache.shape[2]
    tokens, heads, _ = q.shape
    scales = _check(args)
    shape = (tokens, heads, latent)
    out = args.new_out() if args.out is None else args.out
    if out.shape != shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out {describe(out)} must be contiguous {list(shape)}, of q's dtype")
    target, sequences = target_of(q.device), len(args.block_tables)
    prompts = tokens > sequences * DECODE_QUERIES
    queries = triton.cdiv(tokens, max(1, sequences)) if not invariant else DECODE_QUERIES
    tile = latent_tile(target, heads * queries, q.element_size())
    group = min(heads, tile.rows)
    blocks, queries_per_tile = triton.cdiv(heads, group), tile.rows // group
    tiles = tokens // queries_per_tile + sequences if tokens else 0
    kind = KINDS.get(args.cache.dtype, 0)
    cache = args.cache.view(torch.uint8) if kind else args.cache
    rotated = q.shape[2] - latent
    variation: dict[str, Any] = {
        "HEADS": heads, "GROUP": group, "LATENT": latent, "ROTATED": rotated,
        "PADDED": _padded(latent), "PADDED_ROTATED": _padded(rotated), "PAGE": page,
        "ROWS": tile.rows, "KEYS": tile.keys, "SCALES": int(scales in ("tensor", "head")),
        "TOKEN_SCALES": scales == "token", "FP8": kind + 2 * (kind > 0 and target.native_fp8),
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        # The interpreter's bfloat16 products are wrong.
        "UPCAST": INTERPRETED and q.dtype == torch.bfloat16,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    lengths = (args.seq_lens, args.query_start_loc)
    batch = (q, cache, args.block_tables, *lengths, args.scales)
    settings = (token_stride(q), args.block_tables.stride(0), sequences, args.scale)
    few = tiles * blocks < target.processors if programs is None else programs > 1
    if invariant or (prompts and not few):
        launch(latent_attention_kernel, (tiles, blocks), out, *batch, *settings, **variation)
        return out
    states = heads
    splits = max_splits(target, blocks)
    if prompts:
        splits = prompt_splits(target, blocks, tiles * blocks)
    else:
        states *= queries
    splits = min(splits, max(1, MAX_STATES // triton.next_power_of_2(max(1, states))))
    slots = max(1, min(splits, triton.cdiv(args.block_tables.shape[1] * page, SPLIT_KEYS.value)))
    partial = torch.empty((tokens, heads, slots, latent), dtype=torch.float32, device=q.device)
    sums = torch.empty((tokens, heads, slots), dtype=torch.float32, device=q.device)
    programs = (programs or programs_for(target, tile, blocks)) if tokens else 0
    launch(
        split_latent_attention_kernel, (programs, blocks), partial, sums, *batch, *settings, slots,
        splits, **variation,
    )  # fmt: skip
    launch(
        reduce_kernel, (tokens * heads,), out, None, partial, sums, None, *lengths, sequences, 0,
        slots, splits, HEADS=heads, HEAD_SIZE=latent, PADDED=_padded(latent), MAX_SPLITS=MAX_SPLITS,
        KEYS=tile.keys, WINDOW=False, SINKS=False, WRITE_LSE=False, num_warps=8,
    )  # fmt: skip
    return out


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _check(args: MlaArgs) -> str:
    """Raise ValueError for wrong shapes or dtypes; returns the kind of scales."""
    q, cache, tables, latent = args.q, args.cache, args.block_tables, args.latent
    size = q.shape[2]
    for name, value, max_size in (
        ("latent", latent, MAX_LATENT), ("rotated part", size - latent, MAX_ROTATED),
    ):  # fmt: skip
        if not 1 <= value <= max_size:
            raise ValueError(f"a {name} of {value} isn't supported: from 1 to {max_size}")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"q {describe(q)} must be float32, float16 or bfloat16")
    if cache.dim() != 4 or cache.shape[1:] != (1, cache.shape[2], size):
        raise ValueError(f"a cache {describe(cache)} doesn't fit heads of {size}")
    if not cache.is_contiguous():
        raise ValueError("a cache of latents must be contiguous")
    if tables.dim() != 2 or tables.dtype != torch.int32 or not tables.is_contiguous():
        raise ValueError("block_tables must be contiguous int32")
    check_vector("seq_lens", args.seq_lens, len(tables), torch.int32)
    check_vector("query_start_loc", args.query_start_loc, len(tables) + 1, torch.int32)
    return check_cache_scales(cache, args.scales, args.scales)
