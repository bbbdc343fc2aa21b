"""Device functions: passes over one row of logits, and the border that a filter draws in it.

Float bits, made to order like integers, are what borders are searched among: equal logits have one
key, so that a border is exact. Accumulators are as wide as a block, so that a pass has one
reduction at its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

PIVOTS = tl.constexpr(8)
#: Blocks of a row that are on their way while one is looked at: a processor has one row, and one
#: block alone would leave most of the memory's bandwidth unused.
AHEAD = tl.constexpr(8)


@triton.jit
def ordered_keys(x):
    """float32 -> int32 that orders as the floats do; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def floats_of(keys):
    """The inverse of `ordered_keys`."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def row_range(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """(largest logit, its lowest id, smallest finite logit, how many are NaN)."""
    lanes = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    bottoms = tl.full((BLOCK,), float("inf"), tl.float32)
    firsts = tl.full((BLOCK,), VOCAB, tl.int32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=AHEAD):
        at = start + lanes
        x = tl.load(row + at, mask=at < VOCAB, other=float("-inf"))
        nan = x != x
        broken += nan.to(tl.int32)
        x = tl.where(nan, float("-inf"), x)
        firsts = tl.where(x > tops, at, firsts)
        tops = tl.maximum(tops, x)
        bottoms = tl.minimum(bottoms, tl.where(x > float("-inf"), x, float("inf")))
    top = tl.max(tops, 0)
    first = tl.min(tl.where(tops == top, firsts, VOCAB), 0)
    return top, first, tl.min(bottoms, 0), tl.sum(broken, 0)


@triton.jit
def weigh(x, top, inverse):
    """exp((x - top) / temperature); `inverse` is log2(e) / temperature."""
    return tl.exp2((x - top) * inverse)


@triton.jit
def count_and_mass(row, key, top, inverse, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits have at least this key, and their weight (float64)."""
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.int32)
    masses = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=AHEAD):
        at = start + lanes
        x = tl.load(row + at, mask=at < VOCAB, other=float("-inf"))
        kept = ordered_keys(x) >= key
        counts += kept.to(tl.int32)
        masses += tl.where(kept, weigh(x, top, inverse), 0.0)
    return tl.sum(counts, 0), tl.sum(masses.to(tl.float64), 0)


@triton.jit
def narrow(
    row, low, high, count_high, mass_high, wanted, top, inverse, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """One step of the search for a border in the keys [low, high), int64: an eighth of it or less.

    Pivots lie evenly between the values, since logits do so rather than their bits, but always
    apart. Returns (low, high, count and mass from high on, count of the interval).
    """
    step = tl.arange(0, PIVOTS)
    value_low = floats_of(low.to(tl.int32))
    value_high = floats_of((high - 1).to(tl.int32))
    even = value_low + (value_high - value_low) * (step.to(tl.float32) / PIVOTS)
    pivots = tl.maximum(ordered_keys(even).to(tl.int64), low + step)
    pivots = tl.minimum(tl.where(step == 0, low, pivots), high)
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros((PIVOTS, BLOCK), tl.int32)
    masses = tl.zeros((PIVOTS, BLOCK), tl.float32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=AHEAD):
        at = start + lanes
        x = tl.load(row + at, mask=at < VOCAB, other=float("-inf"))
        kept = ordered_keys(x).to(tl.int64)[None, :] >= pivots[:, None]
        counts += kept.to(tl.int32)
        masses += tl.where(kept, weigh(x, top, inverse)[None, :], 0.0)
    count = tl.sum(counts, 1)
    mass = tl.sum(masses.to(tl.float64), 1)
    # Where the interval has fewer keys than there are pivots, the last ones are its end.
    ended = pivots >= high
    count = tl.where(ended, count_high, count)
    mass = tl.where(ended, mass_high, mass)
    if BY_MASS:
        enough = (mass >= wanted) & (pivots < high)
    else:
        enough = (count >= wanted) & (pivots < high)
    # `low` is known to be enough, whatever rounding says of it here.
    last = tl.maximum(tl.sum(enough.to(tl.int32), 0) - 1, 0)
    is_low = step == last
    is_high = step == last + 1
    new_low = tl.sum(tl.where(is_low, pivots, 0), 0)
    count_low = tl.sum(tl.where(is_low, count, 0), 0)
    if last + 1 < PIVOTS:
        high = tl.sum(tl.where(is_high, pivots, 0), 0)
        count_high = tl.sum(tl.where(is_high, count, 0), 0)
        mass_high = tl.sum(tl.where(is_high, mass, 0.0), 0)
    return new_low, high, count_high, mass_high, count_low - count_high


@triton.jit
def gather_interval(
    row, scratch, low, high, VOCAB: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr
):
    """Write the keys in [low, high), at most MOST, to scratch; int32 [MOST] of them, padded."""
    count = tl.full((), 0, tl.int32)
    lanes = tl.arange(0, BLOCK)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=AHEAD):
        at = start + lanes
        x = tl.load(row + at, mask=at < VOCAB, other=float("-inf"))
        keys = ordered_keys(x)
        kept = (keys >= low) & (keys < high) & (at < VOCAB)
        place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(scratch + place, keys, mask=kept & (place < MOST))
        count += tl.sum(kept.to(tl.int32), 0)
    # What other threads of this program wrote is read now.
    tl.debug_barrier()
    order = tl.arange(0, MOST)
    return tl.load(scratch + order, mask=order < count, other=-2147483648)


@triton.jit
def border(
    row, scratch, low, inside, wanted, top, inverse, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Where a prefix of the row, ordered by (logit downwards, id upwards), ends.

    The shortest prefix of `wanted` logits, or of `wanted` weight. All of it is at or above the key
    `low`, from which on there are `inside` logits. Returns (last key, how many of the logits on it
    are in, weight of the prefix).
    """
    low = low.to(tl.int64)
    high = ordered_keys(top).to(tl.int64) + 1
    count_high = tl.full((), 0, tl.int32)
    mass_high = tl.full((), 0.0, tl.float64)
    while (inside > MOST) & (high - low > 1):
        low, high, count_high, mass_high, inside = narrow(
            row, low, high, count_high, mass_high, wanted, top, inverse, VOCAB, BLOCK, BY_MASS
        )
    if inside > MOST:
        # More equal logits than fit: the border lies among them.
        key = low.to(tl.int32)
        each = weigh(floats_of(key), top, inverse).to(tl.float64)
        if BY_MASS:
            ties = tl.ceil((wanted - mass_high) / each).to(tl.int32)
        else:
            ties = (wanted - count_high).to(tl.int32)
        ties = tl.minimum(tl.maximum(ties, 1), inside)
        mass = mass_high + each * ties
    else:
        keys = gather_interval(
            row, scratch, low.to(tl.int32), high.to(tl.int32), VOCAB, BLOCK, MOST
        )
        keys = tl.sort(keys, descending=True)
        order = tl.arange(0, MOST)
        there = order < inside
        weights = tl.where(there, weigh(floats_of(keys), top, inverse), 0.0).to(tl.float64)
        summed = mass_high + tl.cumsum(weights, 0)
        if BY_MASS:
            kept = there & ((summed - weights < wanted) | (order == 0))
        else:
            kept = there & (count_high + order < wanted)
        key = tl.min(tl.where(kept, keys, 2147483647), 0)
        ties = tl.sum((kept & (keys == key)).to(tl.int32), 0)
        mass = mass_high + tl.sum(tl.where(kept, weights, 0.0), 0)
    return key, ties, mass


@triton.jit
def draw(row, key, ties, mass, top, inverse, uniform, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The token at which the kept weights, added up in the order of ids, pass uniform * mass.

    Kept are the keys above `key`, and of those on it the first `ties` by id.
    """
    lanes = tl.arange(0, BLOCK)
    target = mass * uniform
    before = tl.full((), 0.0, tl.float64)
    seen = tl.full((), 0, tl.int32)
    token = tl.full((), -1, tl.int32)
    last = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while (start < VOCAB) & (token < 0):
        at = start + lanes
        x = tl.load(row + at, mask=at < VOCAB, other=float("-inf"))
        keys = ordered_keys(x)
        on = keys == key
        rank = seen + tl.cumsum(on.to(tl.int32), 0)
        kept = ((keys > key) | (on & (rank <= ties))) & (at < VOCAB)
        weights = tl.where(kept, weigh(x, top, inverse), 0.0)
        summed = before + tl.cumsum(weights.to(tl.float64), 0)
        # Rounding may leave the target beyond all of them: then the last with a weight is taken.
        last = tl.maximum(last, tl.max(tl.where(weights > 0, at, 0), 0))
        found = tl.min(tl.where((summed > target) & (weights > 0), at, VOCAB), 0)
        token = tl.where(found < VOCAB, found, token)
        before += tl.sum(weights.to(tl.float64), 0)
        seen += tl.sum(on.to(tl.int32), 0)
        start += BLOCK
    return tl.where(token < 0, last, token)
