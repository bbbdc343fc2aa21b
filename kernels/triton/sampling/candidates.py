"""Sampling among the few largest logits of a row, where those are all that its filters leave."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling.chunks import LOG2E, SETTLED, lowest_key, row_sums
from kernels.triton.sampling.keys import floats_of, ordered_keys, weigh


@triton.jit
def gather_kernel(
    found, floats, ints, logits, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Grid (CHUNKS, rows): collect (key, id) of the logits at or above the row's threshold.

    Chunks whose top is below it aren't read. They come in any order, and are sorted afterwards;
    those beyond MOST are counted alone.
    """
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ints += row * (CHUNKS + 2) + CHUNKS
    bound = tl.load(ints)
    if bound == SETTLED:
        return
    if ordered_keys(tl.load(floats + row * (CHUNKS * (2 + GROUPS)) + chunk)) < bound:
        return
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    keys = ordered_keys(tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=float("-inf")))
    kept = (keys >= bound) & (at < VOCAB)
    begin = tl.atomic_add(ints + 1, tl.sum(kept.to(tl.int32), 0))
    place = begin + tl.cumsum(kept.to(tl.int32), 0) - 1
    packed = (keys.to(tl.int64) << 32) | (2147483647 - at).to(tl.int64)
    tl.store(found + row * MOST + place, packed, mask=kept & (place < MOST))


@triton.jit
def choose_kernel(
    out, found, floats, ints, temperature, top_k, top_p, min_p, uniforms, VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): the token of rows whose filters leave nothing but what was collected.

    Others keep their threshold: `search_kernel` sees to them.
    """
    index = tl.program_id(0).to(tl.int64)
    floats += index * (CHUNKS * (2 + GROUPS))
    ints += index * (CHUNKS + 2) + CHUNKS
    bound = tl.load(ints)
    count = tl.load(ints + 1)
    if (bound == SETTLED) | (count > MOST):
        return
    heat = tl.load(temperature + index)
    inverse = LOG2E / heat
    _, chunk_weights, top, _ = row_sums(floats, inverse, CHUNKS, PADDED)
    most = tl.maximum(tl.load(top_k + index), 1)
    share = tl.load(top_p + index)
    least = tl.load(min_p + index)
    order = tl.arange(0, MOST)
    there = order < count
    packed = tl.load(found + index * MOST + order, mask=there, other=-0x8000000000000000)
    packed = tl.sort(packed, descending=True)
    keys = (packed >> 32).to(tl.int32)
    ids = 2147483647 - (packed & 0xFFFFFFFF).to(tl.int32)
    weights = tl.where(there, weigh(floats_of(keys), top, inverse), 0.0)
    kept = there & (order < most)
    mass = tl.sum(tl.where(kept, weights, 0.0).to(tl.float64), 0)
    # All that weigh anything and min-p leaves, or all of top-k, are there.
    whole = (bound == lowest_key(top, heat, least)) | (count >= most)
    known = whole
    if share < 1.0:
        wanted = mass * share
        if (not whole) & (least <= 0) & (most >= VOCAB):
            wanted = tl.sum(chunk_weights, 0) * share
            known = mass >= wanted
        before = tl.cumsum(weights.to(tl.float64), 0) - weights
        kept = kept & ((before < wanted) | (order == 0))
    if known:
        # Drawn in the order of ids.
        bits = weights.to(tl.int32, bitcast=True).to(tl.int64)
        by_id = tl.sort(tl.where(kept, (ids.to(tl.int64) << 32) | bits, 0x7FFFFFFFFFFFFFFF))
        id_of = (by_id >> 32).to(tl.int32)
        each = (by_id & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        each = tl.where(id_of < 2147483647, each, 0.0)
        summed = tl.cumsum(each.to(tl.float64), 0)
        target = tl.sum(each.to(tl.float64), 0) * tl.load(uniforms + index)
        # Rounding may leave the target beyond all of them: then the last with a weight is taken.
        last = tl.max(tl.where(each > 0, id_of, 0), 0)
        token = tl.min(tl.where((each > 0) & (summed > target), id_of, VOCAB), 0)
        tl.store(out + index, tl.where(token < VOCAB, token, last).to(tl.int64))
        tl.store(ints, SETTLED)
