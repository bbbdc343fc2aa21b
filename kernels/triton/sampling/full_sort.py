"""Sampling of rows whose filters leave more logits than can be sorted at once, or may do so.

Every piece of a row is sorted by a program of its own, once. A border is then searched in all
pieces at a time: how many of a piece's logits reach a key, and what they weigh, is told by its runs
of RUN sorted logits and by one run that is read. Equal logits have one key, so a border is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling.candidates import (
    LOG2E,
    SETTLED,
    draw_in_chunks,
    floats_of,
    lowest_key,
    ordered_keys,
    row_sums,
    weigh,
)

#: Below the key of any logit.
NOTHING = tl.constexpr(-2147483648)
#: More of a piece's logits than there can be.
MANY = tl.constexpr(1073741824.0)


@triton.jit
def sort_kernel(
    ordered, lasts, sums, floats, ints, logits, temperature, VOCAB: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Grid (CHUNKS, rows): a chunk's keys downwards, of rows that aren't settled yet.

    `lasts` has the last key of each run of them, `sums` the float64 weight of the chunk's runs up
    to it.
    """
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(ints + row * (CHUNKS + 2) + CHUNKS) == SETTLED:
        return
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=float("-inf"))
    keys = tl.sort(tl.where(at < VOCAB, ordered_keys(x), NOTHING), descending=True)
    place = row * CHUNKS + chunk
    tl.store(ordered + place * CHUNK + tl.arange(0, CHUNK), keys)
    inverse = LOG2E / tl.load(temperature + row)
    _, _, top, _ = row_sums(floats + row * (CHUNKS * (2 + GROUPS)), inverse, CHUNKS, PADDED)
    weights = tl.where(keys > NOTHING, weigh(floats_of(keys), top, inverse), 0.0)
    run = place * (CHUNK // RUN) + tl.arange(0, CHUNK // RUN)
    tl.store(lasts + run, tl.min(tl.reshape(keys, (CHUNK // RUN, RUN)), 1))
    each = tl.sum(tl.reshape(weights.to(tl.float64), (CHUNK // RUN, RUN)), 1)
    tl.store(sums + run, tl.cumsum(each, 0))


@triton.jit
def prefix_weight(
    own_lasts, ordered, sums, key, top, inverse, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PADDED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """(count int32 [PADDED], weight float64 [PADDED]) of each chunk's logits that reach `key`."""
    RUNS: tl.constexpr = CHUNK // RUN
    chunk = tl.arange(0, PADDED)
    there = chunk < CHUNKS
    whole = tl.sum((own_lasts >= key).to(tl.int32), 1)
    mass = tl.load(sums + chunk * RUNS + whole - 1, mask=there & (whole > 0), other=0.0)
    # Of the next run only some do.
    at = (chunk * CHUNK + whole * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    keys = tl.load(ordered + at, mask=(there & (whole < RUNS))[:, None], other=NOTHING)
    kept = keys >= key
    weights = tl.where(kept, weigh(floats_of(keys), top, inverse), 0.0)
    mass += tl.sum(weights.to(tl.float64), 1)
    return whole * RUN + tl.sum(kept.to(tl.int32), 1), mass


@triton.jit
def prefix_end(
    own_lasts, ordered, sums, low, wanted, top, inverse, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PADDED: tl.constexpr, RUN: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Where a prefix of the row, ordered by (logit downwards, id upwards), ends.

    The shortest prefix of `wanted` logits, or of `wanted` weight, all of it at or above the key
    `low`. Returns (its last key, how many on that key each chunk has of it, each chunk's weight).
    """
    low = low.to(tl.int64)
    high = ordered_keys(top).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        count, mass = prefix_weight(
            own_lasts, ordered, sums, middle.to(tl.int32), top, inverse, CHUNK, CHUNKS, PADDED, RUN
        )
        if BY_MASS:
            enough = tl.sum(mass, 0) >= wanted
        else:
            enough = tl.sum(count, 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    key = low.to(tl.int32)
    count, _ = prefix_weight(
        own_lasts, ordered, sums, key, top, inverse, CHUNK, CHUNKS, PADDED, RUN
    )
    above, mass = prefix_weight(
        own_lasts, ordered, sums, key + 1, top, inverse, CHUNK, CHUNKS, PADDED, RUN
    )
    each = weigh(floats_of(key), top, inverse).to(tl.float64)
    if BY_MASS:
        # `low` may weigh nothing: then all of it is needed.
        missing = tl.ceil((wanted - tl.sum(mass, 0)) / tl.where(each > 0, each, 1.0))
        ties = tl.where(each > 0, tl.minimum(missing, MANY), MANY).to(tl.int32)
    else:
        ties = (wanted - tl.sum(above, 0)).to(tl.int32)
    equal = count - above
    # Ties go to the lower ids.
    before = tl.cumsum(equal, 0) - equal
    own = tl.minimum(tl.maximum(tl.maximum(ties, 1) - before, 0), equal)
    return key, own, mass + each * own


@triton.jit
def search_kernel(
    out, ordered, lasts, sums, floats, ints, logits, temperature, top_k, top_p, min_p, uniforms,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
    PADDED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): the token of rows that aren't settled yet; all of them are whole and warm."""
    index = tl.program_id(0).to(tl.int64)
    if tl.load(ints + index * (CHUNKS + 2) + CHUNKS) == SETTLED:
        return
    RUNS: tl.constexpr = CHUNK // RUN
    ordered += index * (CHUNKS * CHUNK)
    lasts += index * (CHUNKS * RUNS)
    sums += index * (CHUNKS * RUNS)
    heat = tl.load(temperature + index)
    inverse = LOG2E / heat
    floats += index * (CHUNKS * (2 + GROUPS))
    _, _, top, _ = row_sums(floats, inverse, CHUNKS, PADDED)
    run = tl.arange(0, PADDED * RUNS)
    own_lasts = tl.load(lasts + run, mask=run < CHUNKS * RUNS, other=NOTHING)
    own_lasts = tl.reshape(own_lasts, (PADDED, RUNS))
    most = tl.maximum(tl.load(top_k + index), 1)
    share = tl.load(top_p + index)
    key = lowest_key(top, heat, tl.load(min_p + index))
    count, mass = prefix_weight(
        own_lasts, ordered, sums, key, top, inverse, CHUNK, CHUNKS, PADDED, RUN
    )
    ties = count
    if most < tl.sum(count, 0):
        key, ties, mass = prefix_end(
            own_lasts, ordered, sums, key, most, top, inverse, CHUNK, CHUNKS, PADDED, RUN, False
        )
    if share < 1.0:
        wanted = tl.sum(mass, 0) * share
        key, ties, mass = prefix_end(
            own_lasts, ordered, sums, key, wanted, top, inverse, CHUNK, CHUNKS, PADDED, RUN, True
        )
    token = draw_in_chunks(
        logits + index * VOCAB, key, ties, mass, top, inverse, tl.load(uniforms + index), VOCAB,
        CHUNK, PADDED,
    )  # fmt: skip
    tl.store(out + index, token.to(tl.int64))
