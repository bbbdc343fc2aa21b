"""Device functions of paged attention: the distribution of work, and one step over the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.fp8 import decode_fp8
from kernels.triton.launch import INTERPRETED

# The unit of work is a block of KEYS keys for one tile of queries.

#: Minimum keys of a split: a shorter one costs more in the reduction than it gains.
SPLIT_KEYS = tl.constexpr(64 if INTERPRETED else 256)
#: Number of sequences that are examined together.
AT_ONCE = tl.constexpr(8 if INTERPRETED else 128)


@triton.jit
def plan(
    length, count, sliding_window, max_splits, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Return how to divide sequences of `length` tokens, `count` of them queries; scalars or
    vectors.

    Returns (tiles of queries, key blocks per tile, index of the first block, blocks per split,
    index of the first split, splits). All tiles of a sequence count the same, though not all see
    its last keys. There are at most `max_splits` splits.
    """
    SMALLEST: tl.constexpr = SPLIT_KEYS if SPLIT_KEYS > KEYS else KEYS
    first_block = length * 0
    if WINDOW:
        first_block = tl.maximum(length - count - sliding_window + 1, 0) // KEYS
    has_keys = (count > 0) & (length > 0)
    blocks = tl.where(has_keys, tl.cdiv(length, KEYS) - first_block, 0)
    width = tl.maximum(tl.cdiv(tl.cdiv(length, SMALLEST), max_splits), 1) * (SMALLEST // KEYS)
    first_split = first_block // width
    splits = tl.where(has_keys, tl.cdiv(tl.cdiv(length, KEYS), width) - first_split, 0)
    return tl.cdiv(count, QUERIES), blocks, first_block, width, first_split, splits


@triton.jit
def split_work(
    seq_lens, query_start_loc, start, num_seqs, sliding_window, max_splits,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the work of the sequences from `start` on, int32 [AT_ONCE]; 0 beyond the last one."""
    seq = start + tl.arange(0, AT_ONCE)
    in_batch = seq < num_seqs
    length = tl.load(seq_lens + seq, mask=in_batch, other=0)
    begin = tl.load(query_start_loc + seq, mask=in_batch, other=0)
    count = tl.load(query_start_loc + seq + 1, mask=in_batch, other=0) - begin
    tiles, blocks, _, _, _, _ = plan(
        length, count, sliding_window, max_splits, QUERIES, KEYS, WINDOW
    )
    return tiles * blocks


@triton.jit
def program_work_range(
    seq_lens, query_start_loc, num_seqs, sliding_window, max_splits, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return this program's equal share of all work, in the order of sequences.

    Returns (first sequence, work before that sequence, offset of the share within it, end of the
    share).
    """
    total = tl.full((), 0, tl.int32)
    for start in tl.range(0, num_seqs, AT_ONCE):
        total += tl.sum(
            split_work(
                seq_lens, query_start_loc, start, num_seqs, sliding_window, max_splits,
                QUERIES, KEYS, WINDOW,
            ), 0,
        )  # fmt: skip
    total_work = total.to(tl.int64)
    begin = (total_work * tl.program_id(0) // tl.num_programs(0)).to(tl.int32)
    end = (total_work * (tl.program_id(0) + 1) // tl.num_programs(0)).to(tl.int32)
    seq = tl.full((), 0, tl.int32)
    preceding_work = tl.full((), 0, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in tl.range(0, num_seqs, AT_ONCE):
        works = split_work(
            seq_lens, query_start_loc, start, num_seqs, sliding_window, max_splits,
            QUERIES, KEYS, WINDOW,
        )  # fmt: skip
        passed = seen + tl.cumsum(works, 0) <= begin
        seq += tl.sum((passed & (start + tl.arange(0, AT_ONCE) < num_seqs)).to(tl.int32), 0)
        preceding_work += tl.sum(tl.where(passed, works, 0), 0)
        seen += tl.sum(works, 0)
    return seq, preceding_work, begin - preceding_work, end


@triton.jit
def split_at(work_offset, tile, blocks, first_block, width, first_split, splits):
    """Find a tile's first split at or after `work_offset`, an offset in the sequence's work.

    Returns (index of the split, its offset). If there is none, the index is `splits` and the offset
    is that of the next tile.
    """
    within = work_offset % blocks
    slot = tl.where(within == 0, 0, tl.cdiv(first_block + within, width) - first_split)
    begin = tl.maximum((first_split + slot) * width - first_block, 0)
    return slot, tile * blocks + tl.where(slot < splits, begin, blocks)


LOG2E = tl.constexpr(1.4426950408889634)
# Below every score, but finite: the difference of two is 0, not NaN.
NEG_INF = tl.constexpr(-1.0e30)


@triton.jit
def find_sequence(query_start_loc, tile, num_seqs, QUERIES: tl.constexpr):
    """Return the sequence of a tile.

    Sequence s owns the tiles from query_start_loc[s] // QUERIES + s on. These are at least as many
    as it needs for any lengths, so the host needn't know the lengths.
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
def load_tile(cache, row_offsets, seen, dims, HEAD_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Load [KEYS, PADDED] of a cache: only `seen` rows, which begin at `row_offsets`."""
    PADDED: tl.constexpr = dims.shape[0]
    pointers = cache + row_offsets[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=seen[:, None] & (dims < HEAD_SIZE)[None, :], other=0)
    elif PADDED != HEAD_SIZE:
        return tl.load(pointers, mask=(dims < HEAD_SIZE)[None, :], other=0)
    else:
        return tl.load(pointers)


@triton.jit
def to_operand(x, like, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """Convert a cache's values to the queries' dtype, in which they are multiplied.

    FP8 is 1 or 2 to decode e4m3 or e5m2 with integer operations, 3 or 4 to convert them by
    hardware, and 0 for other caches.
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


#: Two pairs of e4m3 -> their first bytes and their second bytes, as float16.
E4M3_PAIRS = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 first, second;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {first, second}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}""")
#: The same for e5m2, which is the upper byte of float16.
E5M2_PAIRS = tl.constexpr("""{
    .reg .b32 moved;
    shl.b32 moved, $2, 8;
    and.b32 $0, moved, 0xff00ff00;
    and.b32 $1, $2, 0xff00ff00;
}""")
#: The same for int8, as bfloat16: the low seven bits in the mantissa of 128 give 128 plus their
#: value. From this 128 is subtracted, or 256 if the sign bit (-128) is set.
INT8_PAIRS = tl.constexpr("""{
    .reg .b32 one, large, minus, other, bits, less;
    mov.b32 one, 0x3f803f80;
    mov.b32 large, 0x43004300;
    mov.b32 minus, 0xc300c300;
    shr.u32 other, $2, 8;
    lop3.b32 bits, $2, 0x007f007f, large, 0xea;
    lop3.b32 less, $2, 0x00800080, minus, 0xea;
    fma.rn.bf16x2 $0, bits, one, less;
    lop3.b32 bits, other, 0x007f007f, large, 0xea;
    lop3.b32 less, other, 0x00800080, minus, 0xea;
    fma.rn.bf16x2 $1, bits, one, less;
}""")


@triton.jit
def to_operands(x, like, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """Split pairs of bytes [KEYS, N] into the values of the first and of the second bytes.

    Matrix loads from shared memory can transpose pairs, but single bytes would be loaded one by
    one. FP8 is as in `to_operand`, but 0 is int8.
    """
    if FP8 == 3:
        low, high = tl.inline_asm_elementwise(
            E4M3_PAIRS, "=&r,=&r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif FP8 == 4:
        low, high = tl.inline_asm_elementwise(
            E5M2_PAIRS, "=&r,=&r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif FP8 == 2:
        low = (x << 8).to(tl.float16, bitcast=True)
        high = (x & 0xFF00).to(tl.float16, bitcast=True)
    elif FP8 == 1:
        low = decode_fp8(x & 0xFF, 1)
        high = decode_fp8(x >> 8, 1)
    elif like == tl.bfloat16:
        # Not reached in the interpreter, where bfloat16 becomes float32.
        low, high = tl.inline_asm_elementwise(
            INT8_PAIRS, "=&r,=&r,r", [x], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        pairs = x.to(tl.int16, bitcast=True)
        low = (pairs << 8) >> 8
        high = pairs >> 8
    if UPCAST:
        return low.to(tl.float32), high.to(tl.float32)
    else:
        return low.to(like), high.to(like)


@triton.jit
def kv_offsets(
    table, start, offsets, seen, kv_head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the token indices of the keys from `start` on in the cache, int64 [KEYS]."""
    if KEYS <= PAGE and PAGE % KEYS == 0:
        # All keys lie in one page.
        page = tl.load(table + start // PAGE).to(tl.int64)
        return (page * KV_HEADS + kv_head) * PAGE + start % PAGE + tl.arange(0, KEYS)
    else:
        if MASKED:
            pages = tl.load(table + offsets // PAGE, mask=seen, other=0).to(tl.int64)
        else:
            pages = tl.load(table + offsets // PAGE).to(tl.int64)
        return (pages * KV_HEADS + kv_head) * PAGE + offsets % PAGE


@triton.jit
def online_softmax_step(
    scores, best, total, offsets, seen, position, factor, soft_cap, slope, sliding_window,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over scores [ROWS, KEYS].

    Scores are scaled by log2(e), so that exponentials are powers of two. Returns (weights, the
    factor for earlier sums, the new maxima, sums of weights).
    """
    if CAPPED:
        # tanh by a power of two; 2^inf gives 1, and 2^-inf gives -1.
        doubled = tl.exp2(scores * (factor * (2.0 * LOG2E / soft_cap))[:, None])
        scores = (soft_cap * LOG2E) * (1.0 - 2.0 / (1.0 + doubled))
        unit = tl.full((scores.shape[0],), 1.0, tl.float32)
    elif ALIBI:
        scores *= (factor * LOG2E)[:, None]
        unit = tl.full((scores.shape[0],), 1.0, tl.float32)
    else:
        # Scale only the maximum; the other scores are scaled when it is subtracted.
        unit = factor * LOG2E
    if ALIBI:
        distance = offsets[None, :] - position[:, None]
        scores += (slope * LOG2E)[:, None] * distance.to(tl.float32)
    if MASKED:
        visible = seen[None, :] & (offsets[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (offsets[None, :] > (position - sliding_window)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1) * unit)
    weights = tl.exp2(scores * unit[:, None] - higher[:, None])
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(weights, 1)
    return weights, shrink, higher, total


@triton.jit
def attention_step(
    accumulated, accumulated_odd, best, total, q, q_odd, position, start, low, high, dims,
    key_cache, value_cache, table, key_scales, value_scales, kv_head,
    factor, soft_cap, slope, sliding_window,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    FP8: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of attention over the keys [start, start + KEYS).

    `factor` [ROWS], the scale of scores, is above 0. Keys and values are multiplied in q's dtype.
    Without MASKED, all queries must see all of the keys. For caches of byte pairs, `q` and
    `accumulated` are the even dimensions, `q_odd` and `accumulated_odd` the odd ones. Returns
    (accumulated, accumulated_odd, best, total).
    """
    PAIRED: tl.constexpr = key_cache.dtype.element_ty == tl.uint16
    WIDTH: tl.constexpr = HEAD_SIZE // 2 if PAIRED else HEAD_SIZE
    offsets = start + tl.arange(0, KEYS)
    seen = (offsets >= low) & (offsets < high)
    token = kv_offsets(table, start, offsets, seen, kv_head, KV_HEADS, PAGE, KEYS, MASKED)
    row_offsets = token * WIDTH
    keys = load_tile(key_cache, row_offsets, seen, dims, WIDTH, MASKED)
    if PAIRED:
        keys, keys_odd = to_operands(keys, q.dtype, FP8, UPCAST)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        scores = tl.dot(q_odd, tl.trans(keys_odd), scores, input_precision=PRECISION)
    else:
        keys = to_operand(keys, q.dtype, FP8, UPCAST)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    if TOKEN_SCALES:
        # Scales of tokens that aren't seen may be anything, even NaN.
        scores *= tl.load(key_scales + token, mask=seen, other=0.0)[None, :]
    weights, shrink, best, total = online_softmax_step(
        scores, best, total, offsets, seen, position, factor, soft_cap, slope, sliding_window,
        WINDOW, CAPPED, ALIBI, MASKED,
    )  # fmt: skip
    accumulated = accumulated * shrink[:, None]
    if PAIRED:
        accumulated_odd = accumulated_odd * shrink[:, None]
    values = load_tile(value_cache, row_offsets, seen, dims, WIDTH, MASKED)
    if TOKEN_SCALES:
        weights *= tl.load(value_scales + token, mask=seen, other=0.0)[None, :]
    weights = weights.to(q.dtype)
    if PAIRED:
        values, values_odd = to_operands(values, q.dtype, FP8, UPCAST)
        accumulated_odd = tl.dot(weights, values_odd, accumulated_odd, input_precision=PRECISION)
    else:
        values = to_operand(values, q.dtype, FP8, UPCAST)
    accumulated = tl.dot(weights, values, accumulated, input_precision=PRECISION)
    return accumulated, accumulated_odd, best, total
