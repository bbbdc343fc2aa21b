"""Sampling among the few largest logits of a row, for filters that leave no others."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered_keys(x):
    """Convert float32 to int32 keys with the same order; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def floats_of(keys):
    """Convert `ordered_keys` back to floats."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(x, top, inverse):
    """Return exp((x - top) / temperature); `inverse` is log2(e) / temperature."""
    return tl.exp2((x - top) * inverse)


#: Stored instead of a threshold once the row's token is chosen.
SETTLED = tl.constexpr(2147483647)
#: log2(e): weights are powers of two.
LOG2E = tl.constexpr(1.4426950408889634)
#: float32 weights vanish this many temperatures below the largest logit: exp(-104) < 2^-149.
UNDERFLOW = tl.constexpr(104.0)


@triton.jit
def scan_kernel(
    floats, ints, logits, temperature, VOCAB: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Scan all logits, once. Grid (CHUNKS, rows).

    Writes for each chunk its maximum (NaN if it contains NaN), the sum of weights relative to that,
    the lowest id of the maximum, and the maxima of GROUPS interleaved groups of its logits. Without
    temperatures, for argmax, it writes neither weights nor groups.
    """
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, 0)
    first = tl.min(tl.where(x == top, ids, VOCAB), 0)
    floats += row * (CHUNKS * (2 + GROUPS))
    tl.store(floats + chunk, tl.where(broken, float("nan"), top))
    tl.store(ints + row * (CHUNKS + 2) + chunk, first)
    if temperature is not None:
        heat = tl.load(temperature + row)
        inverse = LOG2E / tl.where(heat > 0, heat, 1.0)
        # The finite limit gives a chunk of nothing but -inf a weight of 0.
        mass = tl.sum(weigh(x, tl.maximum(top, -3.0e38), inverse), 0)
        tl.store(floats + CHUNKS + chunk, mass)
        tops = tl.max(tl.reshape(x, (CHUNK // GROUPS, GROUPS)), 0)
        tl.store(floats + (2 * CHUNKS + chunk * GROUPS) + tl.arange(0, GROUPS), tops)


@triton.jit
def first_kernel(
    out, floats, ints, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Write the lowest id of a row's maximum; -1 if that isn't finite or a logit is NaN. Grid
    (rows,).
    """
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED)
    floats += index * (CHUNKS * (2 + GROUPS))
    tops = tl.load(floats + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    firsts = tl.load(ints + index * (CHUNKS + 2) + chunk, mask=chunk < CHUNKS, other=VOCAB)
    is_finite = tl.sum((tops != tops).to(tl.int32), 0) == 0
    top = tl.max(tl.where(tops != tops, float("-inf"), tops), 0)
    token = tl.min(tl.where(tops == top, firsts, VOCAB), 0)
    tl.store(
        out + index, tl.where(is_finite & (tl.abs(top) < float("inf")), token, -1).to(tl.int64)
    )


@triton.jit
def row_sums(floats, inverse, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """Return (the chunks' maxima [PADDED], their float64 weights [PADDED] relative to the row's
    maximum, that maximum, whether no logit is NaN); `floats` is the row's.
    """
    chunk = tl.arange(0, PADDED)
    tops = tl.load(floats + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    masses = tl.load(floats + CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    is_finite = tl.sum((tops != tops).to(tl.int32), 0) == 0
    top = tl.max(tl.where(tops != tops, float("-inf"), tops), 0)
    # Chunks without a finite logit have weight 0; -inf - -inf would be NaN.
    weights = tl.where(masses > 0, masses * weigh(tops, top, inverse), 0.0)
    return tops, weights.to(tl.float64), top, is_finite


@triton.jit
def threshold(maxima, top, inverse, min_count, min_mass, ALL: tl.constexpr, PADDED: tl.constexpr):
    """Return the largest key reached by `min_count` of the group maxima, or by `min_mass` of their
    weight.

    At least as many logits are at or above it, and rarely many more, since they are spread over
    groups.
    """
    index = tl.arange(0, PADDED)
    x = tl.load(maxima + index, mask=index < ALL, other=float("-inf"))
    keys = ordered_keys(x)
    weights = tl.where(index < ALL, weigh(x, top, inverse), 0.0)
    low = tl.full((), -2147483648, tl.int64)
    high = ordered_keys(top).to(tl.int64) + 1
    for _ in range(32):
        middle = (low + high) >> 1
        reached = keys.to(tl.int64) >= middle
        count = tl.sum(reached.to(tl.int32), 0)
        mass = tl.sum(tl.where(reached, weights, 0.0), 0)
        enough = (count >= min_count) | (mass >= min_mass)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit
def lowest_key(top, heat, min_p):
    """Return the key of the smallest logit that min-p keeps and whose weight isn't 0."""
    floor = top - heat * UNDERFLOW
    if min_p > 0:
        # min-p keeps logits within temperature * log(1 / min_p) of the top.
        floor = tl.maximum(floor, (top + heat * tl.log(min_p)).to(tl.float32))
    return ordered_keys(tl.maximum(floor, -3.4028234663852886e38))


@triton.jit
def draw_in_chunks(
    row, key, ties, weights, top, inverse, uniform, VOCAB: tl.constexpr, CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Draw a token by weight among those that are kept: first a chunk, then a token in it.

    The kept logits are those above `key` and the first ones equal to it by id, `ties` [PADDED] of
    each chunk. `weights` float64 [PADDED] are the sums of their weights by chunk.
    """
    chunk = tl.arange(0, PADDED)
    sums = tl.cumsum(weights, 0)
    target = tl.sum(weights, 0) * uniform
    has_weight = weights > 0
    last = tl.max(tl.where(has_weight, chunk, 0), 0)
    chosen = tl.min(tl.where(has_weight & (sums > target), chunk, PADDED), 0)
    chosen = tl.where(chosen < PADDED, chosen, last)
    preceding_weight = tl.sum(tl.where(chunk < chosen, weights, 0.0), 0)
    ids = chosen * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf"))
    keys = ordered_keys(x)
    on = keys == key
    rank = tl.cumsum(on.to(tl.int32), 0)
    allowed = (keys > key) | (on & (rank <= tl.sum(tl.where(chunk == chosen, ties, 0), 0)))
    allowed_weights = tl.where(allowed, weigh(x, top, inverse), 0.0)
    summed = preceding_weight + tl.cumsum(allowed_weights.to(tl.float64), 0)
    # If rounding puts the target beyond all of them, take the last one with a weight.
    final = tl.max(tl.where(allowed_weights > 0, ids, 0), 0)
    token = tl.min(tl.where((allowed_weights > 0) & (summed > target), ids, VOCAB), 0)
    return tl.where(token < VOCAB, token, final)


@triton.jit
def select_kernel(
    out, floats, ints, logits, temperature, top_k, top_p, min_p, uniforms,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
    PADDED: tl.constexpr, ENOUGH: tl.constexpr,
):  # fmt: skip
    """Choose the token of rows that are broken, greedy or unfiltered. Grid (rows,).

    Other rows get a threshold: that of the ENOUGH largest logits, or of as many as top-k or top-p
    need. Unless ENOUGH are too few, the filters' borders lie at or above it.
    """
    index = tl.program_id(0).to(tl.int64)
    floats += index * (CHUNKS * (2 + GROUPS))
    ints += index * (CHUNKS + 2)
    heat = tl.load(temperature + index)
    inverse = LOG2E / tl.where(heat > 0, heat, 1.0)
    tops, weights, top, is_finite = row_sums(floats, inverse, CHUNKS, PADDED)
    row_min_p = tl.load(min_p + index)
    share = tl.load(top_p + index)
    row_top_k = tl.load(top_k + index)
    chunk = tl.arange(0, PADDED)
    bound = tl.full((), SETTLED, tl.int32)
    good = is_finite & (tl.abs(top) < float("inf"))
    firsts = tl.load(ints + chunk, mask=chunk < CHUNKS, other=VOCAB)
    token = tl.min(tl.where(tops == top, firsts, VOCAB), 0)
    if good & (heat > 0):
        if (row_top_k >= VOCAB) & (share >= 1.0) & (row_min_p <= 0):
            everything = tl.full((), -2147483648, tl.int32)
            token = draw_in_chunks(
                logits + index * VOCAB, everything, firsts * 0, weights, top, inverse,
                tl.load(uniforms + index), VOCAB, CHUNK, PADDED,
            )  # fmt: skip
        else:
            bound = lowest_key(top, heat, row_min_p)
            if (row_top_k < VOCAB) | (share < 1.0):
                min_count = tl.minimum(row_top_k, ENOUGH).to(tl.int32)
                enough = float("inf")
                if (row_top_k >= VOCAB) & (row_min_p <= 0):
                    enough = (tl.sum(weights, 0) * share).to(tl.float32)
                key = threshold(
                    floats + 2 * CHUNKS, top, inverse, min_count, enough, CHUNKS * GROUPS,
                    PADDED * GROUPS,
                )  # fmt: skip
                bound = tl.maximum(bound, key)
    tl.store(out + index, tl.where(good, token, -1).to(tl.int64))
    tl.store(ints + CHUNKS, bound)
    tl.store(ints + (CHUNKS + 1), 0)


@triton.jit
def gather_kernel(
    candidates, floats, ints, logits, VOCAB: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Collect (key, id) of the logits at or above the row's threshold. Grid (CHUNKS, rows).

    Chunks whose maximum is below it aren't read. The candidates are unordered; those beyond
    MAX_CANDIDATES are only counted.
    """
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ints += row * (CHUNKS + 2) + CHUNKS
    bound = tl.load(ints)
    if bound == SETTLED:
        return
    if ordered_keys(tl.load(floats + row * (CHUNKS * (2 + GROUPS)) + chunk)) < bound:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    keys = ordered_keys(tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf")))
    allowed = (keys >= bound) & (ids < VOCAB)
    begin = tl.atomic_add(ints + 1, tl.sum(allowed.to(tl.int32), 0))
    slots = begin + tl.cumsum(allowed.to(tl.int32), 0) - 1
    packed = (keys.to(tl.int64) << 32) | (2147483647 - ids).to(tl.int64)
    tl.store(
        candidates + row * MAX_CANDIDATES + slots, packed, mask=allowed & (slots < MAX_CANDIDATES)
    )


@triton.jit
def choose_kernel(
    out, candidates, floats, ints, temperature, top_k, top_p, min_p, uniforms, VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Choose the token of rows whose filters keep only collected candidates. Grid (rows,).

    Other rows keep their threshold and are left to `search_kernel`.
    """
    index = tl.program_id(0).to(tl.int64)
    floats += index * (CHUNKS * (2 + GROUPS))
    ints += index * (CHUNKS + 2) + CHUNKS
    bound = tl.load(ints)
    count = tl.load(ints + 1)
    if (bound == SETTLED) | (count > MAX_CANDIDATES):
        return
    heat = tl.load(temperature + index)
    inverse = LOG2E / heat
    _, chunk_weights, top, _ = row_sums(floats, inverse, CHUNKS, PADDED)
    row_top_k = tl.maximum(tl.load(top_k + index), 1)
    share = tl.load(top_p + index)
    row_min_p = tl.load(min_p + index)
    order = tl.arange(0, MAX_CANDIDATES)
    in_range = order < count
    packed = tl.load(
        candidates + index * MAX_CANDIDATES + order, mask=in_range, other=-0x8000000000000000
    )
    packed = tl.sort(packed, descending=True)
    keys = (packed >> 32).to(tl.int32)
    ids = 2147483647 - (packed & 0xFFFFFFFF).to(tl.int32)
    weights = tl.where(in_range, weigh(floats_of(keys), top, inverse), 0.0)
    allowed = in_range & (order < row_top_k)
    mass = tl.sum(tl.where(allowed, weights, 0.0).to(tl.float64), 0)
    # Complete: all logits with a weight that min-p keeps, or all of top-k, were collected.
    is_complete = (bound == lowest_key(top, heat, row_min_p)) | (count >= row_top_k)
    is_decided = is_complete
    if share < 1.0:
        min_mass = mass * share
        if (not is_complete) & (row_min_p <= 0) & (row_top_k >= VOCAB):
            min_mass = tl.sum(chunk_weights, 0) * share
            is_decided = mass >= min_mass
        preceding_mass = tl.cumsum(weights.to(tl.float64), 0) - weights
        allowed = allowed & ((preceding_mass < min_mass) | (order == 0))
    if is_decided:
        # Draw in the order of ids.
        bits = weights.to(tl.int32, bitcast=True).to(tl.int64)
        by_id = tl.sort(tl.where(allowed, (ids.to(tl.int64) << 32) | bits, 0x7FFFFFFFFFFFFFFF))
        id_of = (by_id >> 32).to(tl.int32)
        allowed_weights = (by_id & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        allowed_weights = tl.where(id_of < 2147483647, allowed_weights, 0.0)
        summed = tl.cumsum(allowed_weights.to(tl.float64), 0)
        target = tl.sum(allowed_weights.to(tl.float64), 0) * tl.load(uniforms + index)
        # If rounding puts the target beyond all of them, take the last one with a weight.
        last = tl.max(tl.where(allowed_weights > 0, id_of, 0), 0)
        token = tl.min(tl.where((allowed_weights > 0) & (summed > target), id_of, VOCAB), 0)
        tl.store(out + index, tl.where(token < VOCAB, token, last).to(tl.int64))
        tl.store(ints, SETTLED)
