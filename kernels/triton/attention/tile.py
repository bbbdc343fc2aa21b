"""Device functions of paged attention: which tokens a tile has, and one step over the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.fp8 import decode_fp8

LOG2E = tl.constexpr(1.4426950408889634)
# Below every score there is, yet finite: the difference of two of them is 0, not NaN.
NOTHING = tl.constexpr(-1.0e30)


@triton.jit
def find_sequence(query_start_loc, tile, num_seqs, QUERIES: tl.constexpr):
    """The sequence that tile number `tile` belongs to.

    Sequence s gets the tiles from query_start_loc[s] // QUERIES + s on: at least as many as it
    needs, whatever the lengths, so that the host needn't know them.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first = tl.load(query_start_loc + middle) // QUERIES + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def load_tile(cache, at, seen, dims, HEAD_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """[KEYS, PADDED] of a cache: rows start at element `at`; what isn't `seen` isn't touched."""
    PADDED: tl.constexpr = dims.shape[0]
    pointers = cache + at[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=seen[:, None] & (dims < HEAD_SIZE)[None, :], other=0)
    elif PADDED != HEAD_SIZE:
        return tl.load(pointers, mask=(dims < HEAD_SIZE)[None, :], other=0)
    else:
        return tl.load(pointers)


@triton.jit
def to_operand(x, like, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """A cache's values in the type that they are multiplied in: that of the queries.

    FP8 is 0, 1 or 2 for e4m3 or e5m2 taken apart here, 3 or 4 for those of the device.
    """
    if FP8 == 3:
        x = x.to(tl.float8e4nv, bitcast=True)
    elif FP8 == 4:
        x = x.to(tl.float8e5, bitcast=True)
    elif FP8 > 0:
        x = decode_fp8(x, FP8)
    if UPCAST:
        return x.to(tl.float32)
    else:
        return x.to(like)


@triton.jit
def attend(
    accumulated, best, total, q, position, start, low, high, dims,
    key_cache, value_cache, table, key_scales, value_scales, kv_head,
    factor, soft_cap, slope, sliding_window,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    FP8: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the keys [start, start + KEYS).

    `factor` of products, a number or one a row [ROWS, 1]. Keys and values are multiplied in q's
    type.

    Scores are kept times log2(e), so that the exponentials are powers of two. Without MASKED, all
    queries see all of the keys. Returns (accumulated, best, total).
    """
    offsets = start + tl.arange(0, KEYS)
    seen = (offsets >= low) & (offsets < high)
    if KEYS <= PAGE and PAGE % KEYS == 0:
        # The whole tile lies in one page.
        page = tl.load(table + start // PAGE).to(tl.int64)
        token = (page * KV_HEADS + kv_head) * PAGE + start % PAGE + tl.arange(0, KEYS)
    else:
        if MASKED:
            pages = tl.load(table + offsets // PAGE, mask=seen, other=0).to(tl.int64)
        else:
            pages = tl.load(table + offsets // PAGE).to(tl.int64)
        token = (pages * KV_HEADS + kv_head) * PAGE + offsets % PAGE
    at = token * HEAD_SIZE
    keys = load_tile(key_cache, at, seen, dims, HEAD_SIZE, MASKED)
    keys = to_operand(keys, q.dtype, FP8, UPCAST)
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    if TOKEN_SCALES:
        # Of tokens that aren't seen nothing may be known, not even a finite scale.
        scores *= tl.load(key_scales + token, mask=seen, other=0.0)[None, :]
    if CAPPED:
        # tanh by a power of two; 2^(inf) gives 1, 2^(-inf) gives -1.
        doubled = tl.exp2(scores * (factor * 2.0 * LOG2E / soft_cap))
        scores = (soft_cap * LOG2E) * (1.0 - 2.0 / (1.0 + doubled))
    else:
        scores *= factor * LOG2E
    if ALIBI:
        distance = offsets[None, :] - position[:, None]
        scores += (slope * LOG2E)[:, None] * distance.to(tl.float32)
    if MASKED:
        visible = seen[None, :] & (offsets[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (offsets[None, :] > position[:, None] - sliding_window)
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(weights, 1)
    accumulated = accumulated * shrink[:, None]
    values = load_tile(value_cache, at, seen, dims, HEAD_SIZE, MASKED)
    values = to_operand(values, q.dtype, FP8, UPCAST)
    if TOKEN_SCALES:
        weights *= tl.load(value_scales + token, mask=seen, other=0.0)[None, :]
    accumulated = tl.dot(weights.to(values.dtype), values, accumulated, input_precision=PRECISION)
    return accumulated, higher, total
