"""Device functions of paged attention: a walk over keys, where splits begin, what is written."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.tile import attend
from kernels.triton.launch import INTERPRETED

#: Keys of a split at least: a shorter one costs more in the reduction than it brings.
SPLIT_KEYS = tl.constexpr(64 if INTERPRETED else 256)


@triton.jit
def split_width(length, most_splits, KEYS: tl.constexpr):
    """Keys of each split of a sequence of `length`, so that there are at most `most_splits`."""
    WIDTH: tl.constexpr = SPLIT_KEYS if SPLIT_KEYS > KEYS else KEYS
    return tl.maximum(tl.cdiv(tl.cdiv(length, WIDTH), most_splits), 1) * WIDTH


@triton.jit
def walk(
    best, total, start, plain, diagonal, stop, q, position, low, high,
    key_cache, value_cache, table, key_scales, value_scales, kv_head,
    scale, soft_cap, slope, sliding_window,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The keys [start, stop), of which all queries see all of [plain, diagonal).

    Returns (accumulated, best, total): sums of values and of weights, and their exponents.
    """
    dims = tl.arange(0, PADDED)
    accumulated = tl.zeros((q.shape[0], PADDED), tl.float32)
    if WINDOW:
        for at in tl.range(start, plain, KEYS):
            accumulated, best, total = attend(
                accumulated, best, total, q, position, at, low, high, dims,
                key_cache, value_cache, table, key_scales, value_scales, kv_head,
                scale, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PAGE, KEYS,
                WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST, True,
            )  # fmt: skip
    for at in tl.range(plain, diagonal, KEYS):
        accumulated, best, total = attend(
            accumulated, best, total, q, position, at, low, high, dims,
            key_cache, value_cache, table, key_scales, value_scales, kv_head,
            scale, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PAGE, KEYS,
            WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST, False,
        )  # fmt: skip
    for at in tl.range(diagonal, stop, KEYS):
        accumulated, best, total = attend(
            accumulated, best, total, q, position, at, low, high, dims,
            key_cache, value_cache, table, key_scales, value_scales, kv_head,
            scale, soft_cap, slope, sliding_window, KV_HEADS, HEAD_SIZE, PAGE, KEYS,
            WINDOW, CAPPED, ALIBI, TOKEN_SCALES, FP8, PRECISION, UPCAST, True,
        )  # fmt: skip
    return accumulated, best, total


@triton.jit
def put_state(
    out, lse, accumulated, best, total, place, kv_head, value_scales, inside, valid,
    HEAD_SIZE: tl.constexpr, SCALES: tl.constexpr, WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """Write the rows' normalised sums to `place`; a row that saw no key has a lse of -inf."""
    dims = tl.arange(0, accumulated.shape[1])
    result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    if SCALES == 1:
        result *= tl.load(value_scales)
    elif SCALES == 2:
        result *= tl.load(value_scales + kv_head)
    tl.store(
        out + place[:, None] * HEAD_SIZE + dims[None, :],
        result.to(out.dtype.element_ty), mask=inside,
    )  # fmt: skip
    if WRITE_LSE:
        weight = tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-38)), float("-inf"))
        tl.store(lse + place, weight, mask=valid)
