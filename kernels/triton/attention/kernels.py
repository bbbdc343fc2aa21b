"""The attention kernels: a tile of queries over all of its keys, or over splits of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tensors import describe
from kernels.triton.attention.tile import (
    LOG2E,
    NEG_INF,
    find_sequence,
    plan,
    program_work_range,
    split_at,
)
from kernels.triton.attention.walk import kv_loop, load_queries, store_state, visible_range
from kernels.triton.launch import launch


@triton.jit
def merge_kernel(
    out,
    out_lse,
    first,
    first_lse,
    second,
    second_lse,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid (T * heads,)."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    weight_a = tl.load(first_lse + row)
    weight_b = tl.load(second_lse + row)
    best = tl.maximum(tl.maximum(weight_a, weight_b), -1.0e30)
    # An empty side isn't read, since it may contain anything, even NaN.
    read_a = dims < tl.where(weight_a > -1.0e30, HEAD_SIZE, 0)
    read_b = dims < tl.where(weight_b > -1.0e30, HEAD_SIZE, 0)
    a = tl.load(first + row * HEAD_SIZE + dims, mask=read_a, other=0.0)
    b = tl.load(second + row * HEAD_SIZE + dims, mask=read_b, other=0.0)
    weight_a = tl.exp2(weight_a - best)
    weight_b = tl.exp2(weight_b - best)
    total = weight_a + weight_b
    joined = (a.to(tl.float32) * weight_a + b.to(tl.float32) * weight_b) / tl.where(
        total > 0, total, 1.0
    )
    tl.store(out + row * HEAD_SIZE + dims, joined.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)
    tl.store(
        out_lse + row, tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-38)), float("-inf"))
    )


def merge_attention_states(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return attention over the union of two disjoint sets of keys (Ye et al. 2025, "FlashInfer",
    section 3).

    Args:
        first, second: [T, Hq, D], the normalized attention outputs, contiguous, same dtype.
        first_lse, second_lse: float32 [T, Hq], logarithms to base 2 of the sums of their softmaxes,
            as written by `paged_attention`; -inf for an empty set.

    Returns:
        The merged output and its float32 lse [T, Hq].
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError(f"states {describe(first)} and {describe(second)} differ")
    tokens, heads, size = first.shape
    for lse in (first_lse, second_lse):
        if lse.shape != (tokens, heads) or lse.dtype != torch.float32 or not lse.is_contiguous():
            raise ValueError(f"lse {describe(lse)} must be float32 {[tokens, heads]}")
    if not (first.is_contiguous() and second.is_contiguous()):
        raise ValueError("states must be contiguous")
    out, out_lse = torch.empty_like(first), torch.empty_like(first_lse)
    launch(
        merge_kernel, (tokens * heads,), out, out_lse, first, first_lse, second, second_lse,
        HEAD_SIZE=size, PADDED=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip
    return out, out_lse


#: Arguments that change between steps. Without specialization one binary serves every batch.
_CHANGING = ("num_seqs", "table_stride", "sliding_window")
_SLICED = ("block_tables", "seq_lens", "query_start_loc")


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_SLICED)
def attention_kernel(
    out, lse, q, key_cache, value_cache, block_tables, seq_lens, query_start_loc,
    alibi_slopes, sinks, key_scales, value_scales, visible_ends,
    q_stride, table_stride, num_seqs, scale, soft_cap, sliding_window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    SCALES: tl.constexpr, TOKEN_SCALES: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, HALVES: tl.constexpr, AHEAD: tl.constexpr,
    WRITE_LSE: tl.constexpr, INVARIANT: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Attention of a tile's queries, with all heads of a KV head, over all keys that they see.

    Grid (tiles, KV_HEADS). A row of the tile is a (query, head of the group), so each key is read
    once for the whole group (GQA packing; Dao 2023, "Flash-Decoding"; Kwon et al. 2023,
    "PagedAttention"). SCALES: 0 for none, 1 for one per cache, 2 for one per KV head. With
    INVARIANT every block of keys is masked, so that a row's arithmetic doesn't depend on where the
    tile's other rows end. With SPANS queries also see later keys, up to `visible_ends`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP
    # The last tiles of a prompt have the most keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_sequence(query_start_loc, tile, num_seqs, QUERIES)
    begin = tl.load(query_start_loc + seq)
    count = tl.load(query_start_loc + seq + 1) - begin
    first = (tile - (begin // QUERIES + seq)) * QUERIES
    if first >= count:
        return
    length = tl.load(seq_lens + seq)
    q_tile, position, token, head, slope, inside, valid, factor = load_queries(
        q, q_stride, alibi_slopes, begin, count, length, first, kv_head,
        HEADS, GROUP, QUERIES, HEAD_SIZE, PADDED, ROWS, ALIBI, UPCAST, HALVES,
    )  # fmt: skip
    if SCALES == 1:
        scale *= tl.load(key_scales)
    elif SCALES == 2:
        scale *= tl.load(key_scales + kv_head)
    low, high, start, unmasked_start, diagonal, stop = visible_range(
        length, count, first, sliding_window, QUERIES, KEYS, WINDOW
    )
    if SPANS:
        # From here on a row stands at the last key that it sees, and its window is longer by that.
        last = tl.load(visible_ends + token, mask=valid, other=1) - 1
        sliding_window += last - position
        position = last
        high = tl.maximum(high, tl.max(last, 0) + 1)
        stop = tl.cdiv(high, KEYS) * KEYS
    if INVARIANT:
        unmasked_start = start
        diagonal = start
    best = tl.full((ROWS,), NEG_INF, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        # A sink of -inf counts as no sink; unclamped it would give NaN before a row's first key.
        best = tl.maximum(tl.load(sinks + head, mask=valid, other=0.0) * LOG2E, NEG_INF)
        total += tl.where(best > NEG_INF, 1.0, 0.0)
    accumulated, best, total = kv_loop(
        best, total, start, unmasked_start, diagonal, stop, q_tile, position, low, high,
        key_cache, value_cache, block_tables + seq.to(tl.int64) * table_stride,
        key_scales, value_scales, kv_head,
        scale * factor, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PADDED, PAGE, KEYS,
        WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST, AHEAD,
    )  # fmt: skip
    store_state(
        out, lse, accumulated, best, total, token * HEADS + head, kv_head, value_scales,
        inside, valid, HEAD_SIZE, SCALES, WRITE_LSE,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=(*_CHANGING, "slots", "max_splits"), do_not_specialize_on_alignment=_SLICED
)
def split_attention_kernel(
    partial, lse, q, key_cache, value_cache, block_tables, seq_lens, query_start_loc,
    alibi_slopes, key_scales, value_scales,
    q_stride, table_stride, num_seqs, scale, soft_cap, sliding_window, slots, max_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr,
    SCALES: tl.constexpr, TOKEN_SCALES: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Like `attention_kernel`, but the keys of each sequence are split.

    Grid (programs, KV_HEADS). Each program takes an equal share of the keys of all sequences, in
    whole splits. It writes a split's state to float32 partial [T, HEADS, slots, HEAD_SIZE] and its
    lse, to base 2, to [T, HEADS, slots]; `reduce_kernel` merges them. The boundaries of splits
    depend only on the sequence's own length, so that a row is rounded equally in every batch.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    if SCALES == 1:
        scale *= tl.load(key_scales)
    elif SCALES == 2:
        scale *= tl.load(key_scales + kv_head)
    seq, preceding_work, work_offset, end = program_work_range(
        seq_lens, query_start_loc, num_seqs, sliding_window, max_splits, QUERIES, KEYS, WINDOW
    )
    # `preceding_work` is the work of the sequences before `seq`, `work_offset` the offset within
    # it.
    while preceding_work + work_offset < end:
        begin = tl.load(query_start_loc + seq)
        count = tl.load(query_start_loc + seq + 1) - begin
        length = tl.load(seq_lens + seq)
        tiles, blocks, first_block, width, first_split, splits = plan(
            length, count, sliding_window, max_splits, QUERIES, KEYS, WINDOW
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
                q_tile, position, token, head, slope, inside, valid, factor = load_queries(
                    q, q_stride, alibi_slopes, begin, count, length, tile * QUERIES, kv_head,
                    HEADS, GROUP, QUERIES, HEAD_SIZE, PADDED, ROWS, ALIBI, UPCAST, HALVES,
                )  # fmt: skip
                low, high, start, unmasked_start, diagonal, stop = visible_range(
                    length, count, tile * QUERIES, sliding_window, QUERIES, KEYS, WINDOW
                )
                split_start = tl.maximum((first_split + slot) * width * KEYS, start)
                split_end = tl.minimum((first_split + slot + 1) * width * KEYS, stop)
                accumulated, best, total = kv_loop(
                    tl.full((ROWS,), NEG_INF, tl.float32), tl.zeros((ROWS,), tl.float32),
                    split_start, tl.minimum(tl.maximum(unmasked_start, split_start), split_end),
                    tl.minimum(tl.maximum(diagonal, split_start), split_end), split_end,
                    q_tile, position, low, high, key_cache, value_cache,
                    block_tables + seq.to(tl.int64) * table_stride,
                    key_scales, value_scales, kv_head,
                    scale * factor, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PADDED,
                    PAGE, KEYS, WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST, False,
                )  # fmt: skip
                store_state(
                    partial, lse, accumulated, best, total, (token * HEADS + head) * slots + slot,
                    kv_head, value_scales, inside, valid, HEAD_SIZE, SCALES, True,
                )  # fmt: skip
                work_offset += 1


@triton.jit(
    do_not_specialize=("slots", "max_splits", "num_seqs", "sliding_window"),
    do_not_specialize_on_alignment=("seq_lens", "query_start_loc"),
)
def reduce_kernel(
    out, out_lse, partial, lse, sinks, seq_lens, query_start_loc,
    num_seqs, sliding_window, slots, max_splits,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, MAX_SPLITS: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head of one token. Grid (T * HEADS,).

    MAX_SPLITS doesn't depend on `slots`, and neither does the order of the sum.
    """
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    slot = tl.arange(0, MAX_SPLITS)
    token = tl.program_id(0) // HEADS
    # In a batch of single-token decodes the token index is the sequence index; otherwise search.
    seq = tl.minimum(token, num_seqs - 1)
    begin = tl.load(query_start_loc + seq)
    count = tl.load(query_start_loc + seq + 1) - begin
    if (begin != token) | (count != 1):
        low = 0
        high = num_seqs
        while low < high:
            middle = (low + high) // 2
            if tl.load(query_start_loc + middle) <= token:
                low = middle + 1
            else:
                high = middle
        seq = tl.maximum(low - 1, 0)
        begin = tl.load(query_start_loc + seq)
        count = tl.load(query_start_loc + seq + 1) - begin
    _, _, _, _, _, splits = plan(
        tl.load(seq_lens + seq), count, sliding_window, max_splits, 1, KEYS, WINDOW
    )
    # Padding tokens belong to no sequence.
    splits = tl.where(token - begin < count, splits, 0)
    weights = tl.load(lse + row * slots + slot, mask=slot < splits, other=float("-inf"))
    used = weights > NEG_INF
    best = tl.maximum(tl.max(weights, 0), NEG_INF)
    if SINKS:
        sink = tl.maximum(tl.load(sinks + row % HEADS) * LOG2E, NEG_INF)
        best = tl.maximum(best, sink)
    weights = tl.exp2(weights - best)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.where(sink > NEG_INF, tl.exp2(sink - best), 0.0)
    parts = tl.load(
        partial + (row * slots + slot)[:, None] * HEAD_SIZE + dims[None, :],
        mask=used[:, None] & (dims < HEAD_SIZE)[None, :], other=0.0,
    )  # fmt: skip
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_SIZE + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)
    if WRITE_LSE:
        joined = tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-38)), float("-inf"))
        tl.store(out_lse + row, joined)
