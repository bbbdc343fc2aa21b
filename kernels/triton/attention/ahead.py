"""Device functions of paged attention: a walk in which softmax and products run side by side.

A block's keys are multiplied before the values of the block in front of it are, so that this
second product is under way while the block's softmax is computed (Shah et al. 2024,
"FlashAttention-3"). Only Hopper's products are under way at all; and windows, soft caps, slopes and
caches of eight bits leave no registers for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.tile import load_tile, places_of, soften, to_operand


@triton.jit
def score(
    q, begin, high, dims, key_cache, table, kv_head,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The products of queries and the keys [begin, begin + KEYS)."""
    offsets = begin + tl.arange(0, KEYS)
    seen = offsets < high
    at = HEAD_SIZE * places_of(
        table, begin, offsets, seen, kv_head, KV_HEADS, PAGE, KEYS, MASKED
    )  # fmt: skip
    keys = load_tile(key_cache, at, seen, dims, HEAD_SIZE, MASKED)
    keys = to_operand(keys, q.dtype, 0, UPCAST)
    return tl.dot(q, tl.trans(keys), input_precision=PRECISION)


@triton.jit
def add_values(
    accumulated, shrink, weights, begin, high, dims, like, value_cache, table, kv_head,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """accumulated * shrink + weights * the values [begin, begin + KEYS).

    They are looked up anew: with places kept from block to block no copies are under way, and
    registers spill. `weights` are float32: narrower ones would be written while a product that is
    under way reads their registers, and the compiler waits for it then.
    """
    offsets = begin + tl.arange(0, KEYS)
    seen = offsets < high
    at = HEAD_SIZE * places_of(
        table, begin, offsets, seen, kv_head, KV_HEADS, PAGE, KEYS, MASKED
    )  # fmt: skip
    values = load_tile(value_cache, at, seen, dims, HEAD_SIZE, MASKED)
    values = to_operand(values, like, 0, UPCAST)
    accumulated = accumulated * shrink[:, None]
    return tl.dot(weights.to(like), values, accumulated, input_precision=PRECISION)


@triton.jit
def walk_ahead(
    best, total, start, diagonal, stop, q, position, high, key_cache, value_cache, table, kv_head,
    factor,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """See `walk`: at least one key, of which all queries see those before `diagonal`.

    The first block is scored before the loops, the last one's values are added behind them.
    """
    factor = tl.maximum(factor, 1.0e-30)
    dims = tl.arange(0, PADDED)
    accumulated = tl.zeros((q.shape[0], PADDED), tl.float32)
    scores = score(
        q, start, high, dims, key_cache, table, kv_head,
        KV_HEADS, HEAD_SIZE, PAGE, KEYS, PRECISION, UPCAST, True,
    )  # fmt: skip
    offsets = start + tl.arange(0, KEYS)
    weights, shrink, best, total = soften(
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
        weights, shrink, best, total = soften(
            scores, best, total, offsets, offsets < high, position, factor, 0.0, 0.0, 0,
            False, False, False, False,
        )  # fmt: skip
    for begin in tl.range(tl.maximum(diagonal, second), stop, KEYS):
        scores = score(
            q, begin, high, dims, key_cache, table, kv_head,
            KV_HEADS, HEAD_SIZE, PAGE, KEYS, PRECISION, UPCAST, True,
        )  # fmt: skip
        # A block with another one behind it is seen as a whole by somebody.
        accumulated = add_values(
            accumulated, shrink, weights, begin - KEYS, high, dims, q.dtype, value_cache, table,
            kv_head, KV_HEADS, HEAD_SIZE, PAGE, KEYS, PRECISION, UPCAST, False,
        )  # fmt: skip
        offsets = begin + tl.arange(0, KEYS)
        weights, shrink, best, total = soften(
            scores, best, total, offsets, offsets < high, position, factor, 0.0, 0.0, 0,
            False, False, False, True,
        )  # fmt: skip
    accumulated = add_values(
        accumulated, shrink, weights, stop - KEYS, high, dims, q.dtype, value_cache, table,
        kv_head, KV_HEADS, HEAD_SIZE, PAGE, KEYS, PRECISION, UPCAST, True,
    )  # fmt: skip
    return accumulated, best, total
