"""Sampling of rows whose filters may keep more logits than can be sorted at once.

One program sorts each chunk of a row. A filter's border is then searched in all chunks together:
how many logits of a chunk reach a key, and their weight, follows from its runs of RUN sorted
logits, of which only one must be read. Equal logits have one key, so borders are exact.
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
#: More than a chunk's number of logits.
MANY = tl.constexpr(1073741824.0)


@triton.jit
def sort_kernel(
    ordered, lasts, sums, floats, ints, logits, temperature, VOCAB: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Sort the keys of a chunk in descending order, of rows without a token. Grid (CHUNKS, rows).

    `lasts` receives the last key of each run, `sums` the float64 weight of the chunk's runs up to
    it.
    """
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(ints + row * (CHUNKS + 2) + CHUNKS) == SETTLED:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    keys = tl.sort(tl.where(ids < VOCAB, ordered_keys(x), NOTHING), descending=True)
    chunk_index = row * CHUNKS + chunk
    tl.store(ordered + chunk_index * CHUNK + tl.arange(0, CHUNK), keys)
    inverse = LOG2E / tl.load(temperature + row)
    _, _, top, _ = row_sums(floats + row * (CHUNKS * (2 + GROUPS)), inverse, CHUNKS, PADDED)
    weights = tl.where(keys > NOTHING, weigh(floats_of(keys), top, inverse), 0.0)
    run = chunk_index * (CHUNK // RUN) + tl.arange(0, CHUNK // RUN)
    tl.store(lasts + run, tl.min(tl.reshape(keys, (CHUNK // RUN, RUN)), 1))
    run_weights = tl.sum(tl.reshape(weights.to(tl.float64), (CHUNK // RUN, RUN)), 1)
    tl.store(sums + run, tl.cumsum(run_weights, 0))


@triton.jit
def prefix_weight(
    row_lasts, ordered, sums, key, top, inverse, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PADDED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Return the (int32 count, float64 weight) [PADDED] of each chunk's logits that reach `key`."""
    RUNS: tl.constexpr = CHUNK // RUN
    chunk = tl.arange(0, PADDED)
    in_row = chunk < CHUNKS
    full_runs = tl.sum((row_lasts >= key).to(tl.int32), 1)
    mass = tl.load(sums + chunk * RUNS + full_runs - 1, mask=in_row & (full_runs > 0), other=0.0)
    # Only a part of the next run reaches it.
    offsets = (chunk * CHUNK + full_runs * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    keys = tl.load(ordered + offsets, mask=(in_row & (full_runs < RUNS))[:, None], other=NOTHING)
    reached = keys >= key
    weights = tl.where(reached, weigh(floats_of(keys), top, inverse), 0.0)
    mass += tl.sum(weights.to(tl.float64), 1)
    return full_runs * RUN + tl.sum(reached.to(tl.int32), 1), mass


@triton.jit
def prefix_end(
    row_lasts, ordered, sums, low, target, top, inverse, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PADDED: tl.constexpr, RUN: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Find the end of a prefix of the row, ordered by (logit descending, id ascending).

    It is the shortest prefix of `target` logits, or of weight `target`, entirely at or above the
    key `low`. Returns (its last key, each chunk's number of logits equal to that key, each chunk's
    weight).
    """
    low = low.to(tl.int64)
    high = ordered_keys(top).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        count, mass = prefix_weight(
            row_lasts, ordered, sums, middle.to(tl.int32), top, inverse, CHUNK, CHUNKS, PADDED, RUN
        )
        if BY_MASS:
            enough = tl.sum(mass, 0) >= target
        else:
            enough = tl.sum(count, 0) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    key = low.to(tl.int32)
    count, _ = prefix_weight(
        row_lasts, ordered, sums, key, top, inverse, CHUNK, CHUNKS, PADDED, RUN
    )
    above, mass = prefix_weight(
        row_lasts, ordered, sums, key + 1, top, inverse, CHUNK, CHUNKS, PADDED, RUN
    )
    weight = weigh(floats_of(key), top, inverse).to(tl.float64)
    if BY_MASS:
        # If `low` weighs nothing, all of its ties are included.
        missing = tl.ceil((target - tl.sum(mass, 0)) / tl.where(weight > 0, weight, 1.0))
        ties = tl.where(weight > 0, tl.minimum(missing, MANY), MANY).to(tl.int32)
    else:
        ties = (target - tl.sum(above, 0)).to(tl.int32)
    equal = count - above
    # Lower ids come first among equal logits.
    preceding = tl.cumsum(equal, 0) - equal
    chunk_ties = tl.minimum(tl.maximum(tl.maximum(ties, 1) - preceding, 0), equal)
    return key, chunk_ties, mass + weight * chunk_ties


@triton.jit
def search_kernel(
    out, ordered, lasts, sums, floats, ints, logits, temperature, top_k, top_p, min_p, uniforms,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
    PADDED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Choose the token of rows without one; their logits are valid, their temperature is above 0.
    Grid (rows,).
    """
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
    row_lasts = tl.load(lasts + run, mask=run < CHUNKS * RUNS, other=NOTHING)
    row_lasts = tl.reshape(row_lasts, (PADDED, RUNS))
    row_top_k = tl.maximum(tl.load(top_k + index), 1)
    share = tl.load(top_p + index)
    key = lowest_key(top, heat, tl.load(min_p + index))
    count, mass = prefix_weight(
        row_lasts, ordered, sums, key, top, inverse, CHUNK, CHUNKS, PADDED, RUN
    )
    ties = count
    if row_top_k < tl.sum(count, 0):
        key, ties, mass = prefix_end(
            row_lasts,
            ordered,
            sums,
            key,
            row_top_k,
            top,
            inverse,
            CHUNK,
            CHUNKS,
            PADDED,
            RUN,
            False,
        )
    if share < 1.0:
        target = tl.sum(mass, 0) * share
        key, ties, mass = prefix_end(
            row_lasts, ordered, sums, key, target, top, inverse, CHUNK, CHUNKS, PADDED, RUN, True
        )
    token = draw_in_chunks(
        logits + index * VOCAB, key, ties, mass, top, inverse, tl.load(uniforms + index), VOCAB,
        CHUNK, PADDED,
    )  # fmt: skip
    tl.store(out + index, token.to(tl.int64))
