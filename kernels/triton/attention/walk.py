"""Device functions of paged attention: loading queries, the loop over keys, storing results."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.tile import (
    attention_step,
    kv_offsets,
    load_tile,
    online_softmax_step,
    to_operand,
)

# `score` and `add_values` serve `kv_loop_pipelined`, which multiplies a block's keys before the
# previous block's values, so that the second product overlaps the block's softmax (Shah et al.
# 2024, "FlashAttention-3"). Only Hopper's products are asynchronous. Windows, soft caps, slopes and
# eight-bit caches leave no registers for this.


@triton.jit
def score(
    q, begin, high, dims, key_cache, table, kv_head,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the products of queries and the keys [begin, begin + KEYS)."""
    offsets = begin + tl.arange(0, KEYS)
    seen = offsets < high
    row_offsets = HEAD_SIZE * kv_offsets(
        table, begin, offsets, seen, kv_head, KV_HEADS, PAGE, KEYS, MASKED
    )  # fmt: skip
    keys = load_tile(key_cache, row_offsets, seen, dims, HEAD_SIZE, MASKED)
    keys = to_operand(keys, q.dtype, 0, UPCAST)
    return tl.dot(q, tl.trans(keys), input_precision=PRECISION)


@triton.jit
def add_values(
    accumulated, shrink, weights, begin, high, dims, like, value_cache, table, kv_head,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return accumulated * shrink + weights * the values [begin, begin + KEYS).

    The page table is read again: keeping addresses from block to block prevents asynchronous copies
    and spills registers. `weights` are float32: narrower ones would be written to registers that
    the running product reads, and the compiler would wait for it.
    """
    offsets = begin + tl.arange(0, KEYS)
    seen = offsets < high
    row_offsets = HEAD_SIZE * kv_offsets(
        table, begin, offsets, seen, kv_head, KV_HEADS, PAGE, KEYS, MASKED
    )  # fmt: skip
    values = load_tile(value_cache, row_offsets, seen, dims, HEAD_SIZE, MASKED)
    values = to_operand(values, like, 0, UPCAST)
    accumulated = accumulated * shrink[:, None]
    return tl.dot(weights.to(like), values, accumulated, input_precision=PRECISION)


@triton.jit
def kv_loop_pipelined(
    best, total, start, diagonal, stop, q, position, high, key_cache, value_cache, table, kv_head,
    factor,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """See `kv_loop`. There is at least one key, and all queries see the keys before `diagonal`.

    The first block's scores are computed before the loops, the last block's values are added after
    them.
    """
    factor = tl.maximum(factor, 1.0e-30)
    dims = tl.arange(0, PADDED)
    accumulated = tl.zeros((q.shape[0], PADDED), tl.float32)
    scores = score(
        q, start, high, dims, key_cache, table, kv_head,
        KV_HEADS, HEAD_SIZE, PAGE, KEYS, PRECISION, UPCAST, True,
    )  # fmt: skip
    offsets = start + tl.arange(0, KEYS)
    weights, shrink, best, total = online_softmax_step(
        scores, best, total, offsets, offsets < high, position, factor, 0.0, 0.0, 0,
        False, False, False, True,
    )  # fmt: skip
    second = start + KEYS
    for begin in tl.range(second, diagonal, KEYS):
        scores = score(
            q, begin, high, dims, key_cache, table, kv_head,
            KV_HEADS, HEAD_SIZE, PAGE, KEYS, PRECISION, UPCAST, False,
        )  # fmt: skip
        accumulated = add_values(
            accumulated, shrink, weights, begin - KEYS, high, dims, q.dtype, value_cache, table,
            kv_head, KV_HEADS, HEAD_SIZE, PAGE, KEYS, PRECISION, UPCAST, False,
        )  # fmt: skip
        offsets = begin + tl.arange(0, KEYS)
        weights, shrink, best, total = online_softmax_step(
            scores, best, total, offsets, offsets < high, position, factor, 0.0, 0.0, 0,
            False, False, False, False,
        )  # fmt: skip
    for begin in tl.range(tl.maximum(diagonal, second), stop, KEYS):
        scores = score(
            q, begin, high, dims, key_cache, table, kv_head,
            KV_HEADS, HEAD_SIZE, PAGE, KEYS, PRECISION, UPCAST, True,
        )  # fmt: skip
        # Except the last, every block is seen whole by at least one query.
        accumulated = add_values(
            accumulated, shrink, weights, begin - KEYS, high, dims, q.dtype, value_cache, table,
            kv_head, KV_HEADS, HEAD_SIZE, PAGE, KEYS, PRECISION, UPCAST, False,
        )  # fmt: skip
        offsets = begin + tl.arange(0, KEYS)
        weights, shrink, best, total = online_softmax_step(
            scores, best, total, offsets, offsets < high, position, factor, 0.0, 0.0, 0,
            False, False, False, True,
        )  # fmt: skip
    accumulated = add_values(
        accumulated, shrink, weights, stop - KEYS, high, dims, q.dtype, value_cache, table,
        kv_head, KV_HEADS, HEAD_SIZE, PAGE, KEYS, PRECISION, UPCAST, True,
    )  # fmt: skip
    return accumulated, best, total


@triton.jit
def load_queries(
    q, q_stride, alibi_slopes, begin, count, length, first, kv_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, ALIBI: tl.constexpr, UPCAST: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Load a tile from a sequence's query `first` on.

    Returns (queries [ROWS, PADDED], positions, tokens, heads, slopes, mask of values, mask of rows,
    factors of the rows). With HALVES each row is scaled by a power of two and becomes float16,
    without losing any of bfloat16's bits: converting eight-bit keys and values to float16 takes one
    instruction, to bfloat16 four.
    """
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    query = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    valid = (rows < QUERIES * GROUP) & (query < count)
    position = length - count + query
    token = (begin + query).to(tl.int64)
    inside = valid[:, None] & (dims < HEAD_SIZE)[None, :]
    tile = tl.load(
        q + token[:, None] * q_stride + (head * HEAD_SIZE)[:, None] + dims[None, :],
        mask=inside, other=0.0,
    )  # fmt: skip
    factor = tl.full((ROWS,), 1.0, tl.float32)
    if HALVES:
        tile = tile.to(tl.float32)
        exponent = tl.max(tl.abs(tile), 1).to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 15), 254)
        # 2^14 divided by the power of two of the largest value, and the inverse.
        larger = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
        factor = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        tile = (tile * larger[:, None]).to(tl.float16)
    if UPCAST:
        tile = tile.to(tl.float32)
    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_slopes + head, mask=valid, other=0.0)
    return tile, position, token, head, slope, inside, valid, factor


@triton.jit
def visible_range(
    length, count, first, sliding_window, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Return which keys the queries of a tile see.

    Some query sees keys [low, high), every query sees keys [unmasked_start, diagonal), and the loop
    reads [start, stop). The last four are multiples of KEYS. Returns (low, high, start,
    unmasked_start, diagonal, stop).
    """
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
    unmasked_start = tl.minimum(tl.maximum(tl.cdiv(all_low, KEYS) * KEYS, start), stop)
    diagonal = tl.maximum(tl.minimum((oldest + 1) // KEYS * KEYS, stop), unmasked_start)
    return low, high, start, unmasked_start, diagonal, stop


@triton.jit
def kv_loop(
    best, total, start, unmasked_start, diagonal, stop, q, position, low, high,
    key_cache, value_cache, table, key_scales, value_scales, kv_head,
    factor, soft_cap, slope, sliding_window,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Attention over the keys [start, stop); all queries see all of [unmasked_start, diagonal).

    Returns (accumulated, best, total): the weighted sum of values, the maximum score to base 2, and
    the sum of the weights relative to it. AHEAD selects `kv_loop_pipelined`, whose results are
    bitwise equal.
    """
    if AHEAD:
        tl.static_assert(not (WINDOW or CAPPED or ALIBI or TOKEN_SCALES) and FP8 == 0)
        return kv_loop_pipelined(
            best, total, start, diagonal, stop, q, position, high, key_cache, value_cache, table,
            kv_head, factor, KV_HEADS, HEAD_SIZE, PADDED, PAGE, KEYS, PRECISION, UPCAST,
        )  # fmt: skip
    else:
        return walk_in_turn(
            best, total, start, unmasked_start, diagonal, stop, q, position, low, high,
            key_cache, value_cache, table, key_scales, value_scales, kv_head,
            factor, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PADDED, PAGE, KEYS,
            WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST,
        )  # fmt: skip


@triton.jit
def walk_in_turn(
    best, total, start, unmasked_start, diagonal, stop, q, position, low, high,
    key_cache, value_cache, table, key_scales, value_scales, kv_head,
    factor, soft_cap, slope, sliding_window,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """See `kv_loop`: a block's values are multiplied before the next block's keys."""
    PAIRED: tl.constexpr = key_cache.dtype.element_ty == tl.uint16
    NUMBERS: tl.constexpr = PADDED // 2 if PAIRED else PADDED
    # 0 * -inf would be NaN; a factor this small is as good as 0.
    factor = tl.maximum(factor, 1.0e-30)
    dims = tl.arange(0, NUMBERS)
    accumulated = tl.zeros((q.shape[0], NUMBERS), tl.float32)
    if PAIRED:
        q, q_odd = tl.split(tl.reshape(q, (q.shape[0], NUMBERS, 2)))
        accumulated_odd = accumulated
    else:
        q_odd = 0.0
        accumulated_odd = 0.0
    if WINDOW:
        for block_start in tl.range(start, unmasked_start, KEYS):
            accumulated, accumulated_odd, best, total = attention_step(
                accumulated, accumulated_odd, best, total, q, q_odd, position, block_start, low,
                high, dims, key_cache, value_cache, table, key_scales, value_scales, kv_head,
                factor, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PAGE, KEYS,
                WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST, True,
            )  # fmt: skip
    for block_start in tl.range(unmasked_start, diagonal, KEYS):
        accumulated, accumulated_odd, best, total = attention_step(
            accumulated, accumulated_odd, best, total, q, q_odd, position, block_start, low, high,
            dims, key_cache, value_cache, table, key_scales, value_scales, kv_head,
            factor, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PAGE, KEYS,
            WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST, False,
        )  # fmt: skip
    for block_start in tl.range(diagonal, stop, KEYS):
        accumulated, accumulated_odd, best, total = attention_step(
            accumulated, accumulated_odd, best, total, q, q_odd, position, block_start, low, high,
            dims, key_cache, value_cache, table, key_scales, value_scales, kv_head,
            factor, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PAGE, KEYS,
            WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST, True,
        )  # fmt: skip
    if PAIRED:
        accumulated = tl.interleave(accumulated, accumulated_odd)
    return accumulated, best, total


@triton.jit
def store_state(
    out, lse, accumulated, best, total, out_index, kv_head, value_scales, inside, valid,
    HEAD_SIZE: tl.constexpr, SCALES: tl.constexpr, WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """Write the rows' normalized sums to `out_index`; the lse of a row without keys is -inf."""
    dims = tl.arange(0, accumulated.shape[1])
    result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    if SCALES == 1:
        result *= tl.load(value_scales)
    elif SCALES == 2:
        result *= tl.load(value_scales + kv_head)
    tl.store(
        out + out_index[:, None] * HEAD_SIZE + dims[None, :],
        result.to(out.dtype.element_ty), mask=inside,
    )  # fmt: skip
    if WRITE_LSE:
        weight = tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-38)), float("-inf"))
        tl.store(lse + out_index, weight, mask=valid)
