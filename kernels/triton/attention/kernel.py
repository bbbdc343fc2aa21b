"""The attention kernel and the reduction of its splits."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.tile import LOG2E, attend, find_sequence

# Below every score there is, yet finite: the difference of two of them is 0, not NaN.
NOTHING = tl.constexpr(-1.0e30)


@triton.jit
def attention_kernel(
    out, lse, q, key_cache, value_cache, block_tables, seq_lens, query_start_loc,
    alibi_slopes, sinks, key_scales, value_scales,
    q_stride, table_stride, num_seqs, scale, soft_cap, sliding_window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    TENSOR_SCALES: tl.constexpr, TOKEN_SCALES: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """A tile of queries and all heads that share a KV head, over one split of the keys.

    Grid (tiles, KV_HEADS, SPLITS). A row of the tile is (query, head of the group), so that one
    read of a key serves the whole group (GQA packing; Dao 2023, "Flash-Decoding"; Kwon et al. 2023,
    "PagedAttention"). With one split `out` is the result [T, HEADS, HEAD_SIZE], with several
    float32 [T, HEADS, SPLITS, HEAD_SIZE] beside `lse` [T, HEADS, SPLITS], in powers of two.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP
    # The last tiles of a prompt have most to do: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
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
    if TENSOR_SCALES:
        scale *= tl.load(key_scales)
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
    tiles = tl.cdiv(high, KEYS) - low // KEYS
    share = tl.cdiv(tiles, SPLITS)
    start = (low // KEYS + split * share) * KEYS
    end = tl.minimum(start + share * KEYS, tl.cdiv(high, KEYS) * KEYS)
    plain = tl.minimum(tl.maximum(tl.cdiv(all_low, KEYS) * KEYS, start), end)
    diagonal = tl.maximum(tl.minimum((oldest + 1) // KEYS * KEYS, end), plain)

    best = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:  # noqa: SIM102  SINKS is decided when the kernel is compiled, split when it runs
        if split == 0:
            sink = tl.load(sinks + head, mask=valid, other=0.0)
            best = sink * LOG2E
            total += 1.0
    accumulated = tl.zeros((ROWS, PADDED), tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride
    if WINDOW:
        for at in tl.range(start, plain, KEYS):
            accumulated, best, total = attend(
                accumulated, best, total, q_tile, position, at, low, high, dims,
                key_cache, value_cache, table, key_scales, value_scales, kv_head,
                scale, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PAGE, KEYS,
                WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST, True,
            )  # fmt: skip
    for at in tl.range(plain, diagonal, KEYS):
        accumulated, best, total = attend(
            accumulated, best, total, q_tile, position, at, low, high, dims,
            key_cache, value_cache, table, key_scales, value_scales, kv_head,
            scale, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PAGE, KEYS,
            WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST, False,
        )  # fmt: skip
    for at in tl.range(diagonal, end, KEYS):
        accumulated, best, total = attend(
            accumulated, best, total, q_tile, position, at, low, high, dims,
            key_cache, value_cache, table, key_scales, value_scales, kv_head,
            scale, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PAGE, KEYS,
            WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST, True,
        )  # fmt: skip

    # A split without keys has a total of 0 and weighs nothing in the reduction.
    result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    if TENSOR_SCALES:
        result *= tl.load(value_scales)
    place = (token * HEADS + head) * SPLITS + split
    tl.store(
        out + place[:, None] * HEAD_SIZE + dims[None, :],
        result.to(out.dtype.element_ty), mask=inside,
    )  # fmt: skip
    if WRITE_LSE:
        weight = tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-38)), float("-inf"))
        tl.store(lse + place, weight, mask=valid)


@triton.jit
def reduce_kernel(
    out, out_lse, partial, lse,
    HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, ROUND: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """Grid (T * HEADS,): the splits of one head of one token, weighted and added up."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    splits = tl.arange(0, ROUND)
    weights = tl.load(lse + row * SPLITS + splits, mask=splits < SPLITS, other=float("-inf"))
    best = tl.maximum(tl.max(weights, 0), NOTHING)
    used = weights > NOTHING
    weights = tl.exp2(weights - best)
    total = tl.sum(weights, 0)
    parts = tl.load(
        partial + (row * SPLITS + splits)[:, None] * HEAD_SIZE + dims[None, :],
        mask=used[:, None] & (dims < HEAD_SIZE)[None, :], other=0.0,
    )  # fmt: skip
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_SIZE + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)
    if WRITE_LSE:
        joined = tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-38)), float("-inf"))
        tl.store(out_lse + row, joined)
