"""The attention kernel and the reduction of its splits."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.tile import LOG2E, NOTHING, find_sequence
from kernels.triton.attention.walk import put_state, split_width, walk


@triton.jit
def attention_kernel(
    out, lse, q, key_cache, value_cache, block_tables, seq_lens, query_start_loc,
    alibi_slopes, sinks, key_scales, value_scales,
    q_stride, table_stride, num_seqs, scale, soft_cap, sliding_window, most_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SLOTS: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    SCALES: tl.constexpr, TOKEN_SCALES: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """A tile of queries and all heads that share a KV head, over some splits of the keys.

    Grid (tiles, KV_HEADS, programs that share out the splits). A row of the tile is (query, head of
    the group), so that one read of a key serves the whole group (GQA packing; Dao 2023,
    "Flash-Decoding"; Kwon et al. 2023, "PagedAttention"). With one slot `out` is the result
    [T, HEADS, HEAD_SIZE], with several float32 [T, HEADS, SLOTS, HEAD_SIZE] beside `lse`
    [T, HEADS, SLOTS], in powers of two: a slot a split. Where splits begin depends on the
    sequence's own length alone, so that a row is rounded the same in every batch. SCALES: 0 none,
    1 one a cache, 2 one a KV head.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP
    # The last tiles of a prompt have most to do: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_sequence(query_start_loc, tile, num_seqs, QUERIES)
    begin = tl.load(query_start_loc + seq)
    count = tl.load(query_start_loc + seq + 1) - begin
    first = (tile - (begin // QUERIES + seq)) * QUERIES
    if first >= count:
        return
    length = tl.load(seq_lens + seq)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    query = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    valid = (rows < QUERIES * GROUP) & (query < count)
    position = length - count + query
    token = (begin + query).to(tl.int64)
    inside = valid[:, None] & (dims < HEAD_SIZE)[None, :]
    q_tile = tl.load(
        q + token[:, None] * q_stride + (head * HEAD_SIZE)[:, None] + dims[None, :],
        mask=inside, other=0.0,
    )  # fmt: skip
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    if SCALES == 1:
        scale *= tl.load(key_scales)
    elif SCALES == 2:
        scale *= tl.load(key_scales + kv_head)
    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_slopes + head, mask=valid, other=0.0)

    # Keys [low, high) are seen by some query, [all_low, all_high) by all of them.
    oldest = length - count + first
    newest = tl.minimum(oldest + QUERIES, length) - 1
    high = newest + 1
    low = 0
    all_low = 0
    if WINDOW:
        low = tl.maximum(oldest - sliding_window + 1, 0)
        all_low = tl.maximum(newest - sliding_window + 1, 0)
    start = low // KEYS * KEYS
    stop = tl.cdiv(high, KEYS) * KEYS
    plain = tl.minimum(tl.maximum(tl.cdiv(all_low, KEYS) * KEYS, start), stop)
    diagonal = tl.maximum(tl.minimum((oldest + 1) // KEYS * KEYS, stop), plain)
    table = block_tables + seq.to(tl.int64) * table_stride

    if SLOTS == 1:
        best = tl.full((ROWS,), NOTHING, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if SINKS:
            # A sink of -inf is none: as it is, it would make NaN of rows that have seen no key yet.
            best = tl.maximum(tl.load(sinks + head, mask=valid, other=0.0) * LOG2E, NOTHING)
            total += tl.where(best > NOTHING, 1.0, 0.0)
        accumulated, best, total = walk(
            best, total, start, plain, diagonal, stop, q_tile, position, low, high,
            key_cache, value_cache, table, key_scales, value_scales, kv_head,
            scale, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PADDED, PAGE, KEYS,
            WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST,
        )  # fmt: skip
        put_state(
            out, lse, accumulated, best, total, token * HEADS + head, kv_head, value_scales,
            inside, valid, HEAD_SIZE, SCALES, WRITE_LSE,
        )  # fmt: skip
    else:
        width = split_width(length, most_splits, KEYS)
        first_split = low // width
        splits = tl.cdiv(high, width) - first_split
        for slot in tl.range(tl.program_id(2), SLOTS, tl.num_programs(2)):
            place = (token * HEADS + head) * SLOTS + slot
            if slot < splits:
                left = tl.maximum((first_split + slot) * width, start)
                right = tl.minimum((first_split + slot + 1) * width, stop)
                accumulated, best, total = walk(
                    tl.full((ROWS,), NOTHING, tl.float32), tl.zeros((ROWS,), tl.float32),
                    left, tl.minimum(tl.maximum(plain, left), right),
                    tl.minimum(tl.maximum(diagonal, left), right), right,
                    q_tile, position, low, high,
                    key_cache, value_cache, table, key_scales, value_scales, kv_head,
                    scale, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PADDED, PAGE,
                    KEYS, WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST,
                )  # fmt: skip
                put_state(
                    out, lse, accumulated, best, total, place, kv_head, value_scales,
                    inside, valid, HEAD_SIZE, SCALES, WRITE_LSE,
                )  # fmt: skip
            else:
                # No keys: nothing is written but that it weighs nothing.
                tl.store(lse + place, tl.full((ROWS,), float("-inf"), tl.float32), mask=valid)


@triton.jit
def reduce_kernel(
    out, out_lse, partial, lse, sinks, slots,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, ROUND: tl.constexpr,
    SINKS: tl.constexpr, WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """Grid (T * HEADS,): the splits of one head of one token, weighted and added up.

    ROUND is the same whatever `slots` is, and so is the order in which they are added.
    """
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    slot = tl.arange(0, ROUND)
    weights = tl.load(lse + row * slots + slot, mask=slot < slots, other=float("-inf"))
    used = weights > NOTHING
    best = tl.maximum(tl.max(weights, 0), NOTHING)
    if SINKS:
        sink = tl.maximum(tl.load(sinks + row % HEADS) * LOG2E, NOTHING)
        best = tl.maximum(best, sink)
    weights = tl.exp2(weights - best)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.where(sink > NOTHING, tl.exp2(sink - best), 0.0)
    parts = tl.load(
        partial + (row * slots + slot)[:, None] * HEAD_SIZE + dims[None, :],
        mask=used[:, None] & (dims < HEAD_SIZE)[None, :], other=0.0,
    )  # fmt: skip
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_SIZE + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)
    if WRITE_LSE:
        joined = tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-38)), float("-inf"))
        tl.store(out_lse + row, joined)
