"""The kernels of attention over latents: a tile of queries over all keys, or over splits."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.shares import plan, share_of, split_at
from kernels.triton.attention.tile import (
    LOG2E,
    NOTHING,
    find_sequence,
    load_tile,
    places_of,
    to_operand,
)
from kernels.triton.attention.walk import put_state


@triton.jit
def load_latent_queries(
    q, q_stride, begin, count, length, first,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr,
    PADDED: tl.constexpr, BESIDE: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The program's heads of a sequence's queries from `first` on.

    A row is (query, head of the block of GROUP). Returns (what meets latents [ROWS, PADDED], what
    is rotated [ROWS, BESIDE], positions, tokens, heads, which rows are there).
    """
    rows = tl.arange(0, ROWS)
    query = first + rows // GROUP
    head = tl.program_id(1) * GROUP + rows % GROUP
    valid = (rows < ROWS // GROUP * GROUP) & (query < count) & (head < HEADS)
    token = (begin + query).to(tl.int64)
    at = token * q_stride + head * (LATENT + ROTATED)
    low = load_tile(q, at + ROTATED, valid, tl.arange(0, PADDED), LATENT, True)
    high = load_tile(q, at, valid, tl.arange(0, BESIDE), ROTATED, True)
    if UPCAST:
        low = low.to(tl.float32)
        high = high.to(tl.float32)
    return low, high, length - count + query, token, head, valid


@triton.jit
def walk_latents(
    q, q_beside, position, start, stop, cache, table, scales, scale,
    LATENT: tl.constexpr, ROTATED: tl.constexpr, PADDED: tl.constexpr, BESIDE: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    FP8: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys [start, stop), of which a row sees those up to its position.

    `start` is a multiple of KEYS. Returns (accumulated, best, total): sums of latents and of
    weights, and their exponents.
    """
    dims = tl.arange(0, PADDED)
    beside = tl.arange(0, BESIDE)
    best = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    accumulated = tl.zeros((ROWS, PADDED), tl.float32)
    for first in tl.range(start, stop, KEYS):
        offsets = first + tl.arange(0, KEYS)
        there = offsets < stop
        place = places_of(table, first, offsets, there, 0, 1, PAGE, KEYS, True)
        at = place * (LATENT + ROTATED)
        latents = load_tile(cache, at + ROTATED, there, dims, LATENT, True)
        rotated = load_tile(cache, at, there, beside, ROTATED, True)
        latents = to_operand(latents, q.dtype, FP8, UPCAST)
        rotated = to_operand(rotated, q.dtype, FP8, UPCAST)
        scores = tl.dot(q, tl.trans(latents), input_precision=PRECISION)
        scores = tl.dot(q_beside, tl.trans(rotated), scores, input_precision=PRECISION)
        if TOKEN_SCALES:
            size = tl.load(scales + place, mask=there, other=0.0)
            scores *= size[None, :]
        visible = there[None, :] & (offsets[None, :] <= position[:, None])
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
    PADDED: tl.constexpr, BESIDE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SCALES: tl.constexpr, TOKEN_SCALES: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile of queries with GROUP of their heads, over all keys that they see.

    Grid (tiles, blocks of heads). SCALES: one for the cache. Every block of keys is masked, so that
    a row's are computed alike wherever the tile's other rows end.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    # The last tiles of a prompt have most to do: they begin first.
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
        HEADS, GROUP, LATENT, ROTATED, PADDED, BESIDE, ROWS, UPCAST,
    )  # fmt: skip
    stop = tl.minimum(length - count + first + QUERIES, length)
    accumulated, best, total = walk_latents(
        low, high, position, 0, stop, cache, block_tables + seq.to(tl.int64) * table_stride, scales,
        scale, LATENT, ROTATED, PADDED, BESIDE, PAGE, ROWS, KEYS, TOKEN_SCALES, FP8, PRECISION,
        UPCAST,
    )  # fmt: skip
    inside = valid[:, None] & (tl.arange(0, PADDED) < LATENT)[None, :]
    put_state(
        out, scales, accumulated, best, total, token * HEADS + head, 0, scales, inside, valid,
        LATENT, SCALES, False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=("num_seqs", "table_stride", "slots", "most_splits"),
    do_not_specialize_on_alignment=("block_tables", "seq_lens", "query_start_loc"),
)
def split_latent_attention_kernel(
    partial, lse, q, cache, block_tables, seq_lens, query_start_loc, scales,
    q_stride, table_stride, num_seqs, scale, slots, most_splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr,
    PADDED: tl.constexpr, BESIDE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SCALES: tl.constexpr, TOKEN_SCALES: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """As `latent_attention_kernel`, but the keys of each sequence are split.

    Grid (programs, blocks of heads). Keys are shared out as in `split_attention_kernel`; states go
    to partial [T, HEADS, slots, LATENT] and lse [T, HEADS, slots].
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    if SCALES:
        scale *= tl.load(scales)
    seq, before, place, end = share_of(
        seq_lens, query_start_loc, num_seqs, 0, most_splits, QUERIES, KEYS, False
    )
    while before + place < end:
        begin = tl.load(query_start_loc + seq)
        count = tl.load(query_start_loc + seq + 1) - begin
        length = tl.load(seq_lens + seq)
        tiles, blocks, first_block, width, first_split, splits = plan(
            length, count, 0, most_splits, QUERIES, KEYS, False
        )
        if place >= tiles * blocks:
            before += tiles * blocks
            place = tl.zeros_like(place)
            seq += 1
        else:
            tile = place // blocks
            slot, place = split_at(place, tile, blocks, first_block, width, first_split, splits)
            if (slot < splits) & (before + place < end):
                low, high, position, token, head, valid = load_latent_queries(
                    q, q_stride, begin, count, length, tile * QUERIES,
                    HEADS, GROUP, LATENT, ROTATED, PADDED, BESIDE, ROWS, UPCAST,
                )  # fmt: skip
                seen = tl.minimum(length - count + (tile + 1) * QUERIES, length)
                start = slot * width * KEYS
                accumulated, best, total = walk_latents(
                    low, high, position, start, tl.minimum(start + width * KEYS, seen), cache,
                    block_tables + seq.to(tl.int64) * table_stride, scales, scale,
                    LATENT, ROTATED, PADDED, BESIDE, PAGE, ROWS, KEYS, TOKEN_SCALES, FP8, PRECISION,
                    UPCAST,
                )  # fmt: skip
                inside = valid[:, None] & (tl.arange(0, PADDED) < LATENT)[None, :]
                put_state(
                    partial, lse, accumulated, best, total, (token * HEADS + head) * slots + slot,
                    0, scales, inside, valid, LATENT, SCALES, True,
                )  # fmt: skip
                place += 1
