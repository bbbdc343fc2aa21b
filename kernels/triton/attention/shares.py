"""Device functions of paged attention: how a batch's keys are shared out among programs.

The unit of work is a block of KEYS keys that one tile of queries walks over.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import INTERPRETED

#: Keys of a split at least: a shorter one costs more in the reduction than it brings.
SPLIT_KEYS = tl.constexpr(64 if INTERPRETED else 256)
#: Sequences that are looked at together.
AT_ONCE = tl.constexpr(8 if INTERPRETED else 128)


@triton.jit
def plan(
    length, count, sliding_window, most_splits, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """How sequences of `length` tokens, `count` of them queries, are cut up; numbers or vectors.

    Returns (tiles of queries, blocks that each walks over, the first one's number, blocks of a
    split, the first split's number, splits). All tiles of a sequence count alike, though not all
    see its last keys. There are at most `most_splits` splits.
    """
    SMALLEST: tl.constexpr = SPLIT_KEYS if SPLIT_KEYS > KEYS else KEYS
    first_block = length * 0
    if WINDOW:
        first_block = tl.maximum(length - count - sliding_window + 1, 0) // KEYS
    there = (count > 0) & (length > 0)
    blocks = tl.where(there, tl.cdiv(length, KEYS) - first_block, 0)
    width = tl.maximum(tl.cdiv(tl.cdiv(length, SMALLEST), most_splits), 1) * (SMALLEST // KEYS)
    first_split = first_block // width
    splits = tl.where(there, tl.cdiv(tl.cdiv(length, KEYS), width) - first_split, 0)
    return tl.cdiv(count, QUERIES), blocks, first_block, width, first_split, splits


@triton.jit
def works_of(
    seq_lens, query_start_loc, start, num_seqs, sliding_window, most_splits,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """int32 [AT_ONCE]: work of the sequences from `start` on; 0 beyond the last one."""
    seq = start + tl.arange(0, AT_ONCE)
    there = seq < num_seqs
    length = tl.load(seq_lens + seq, mask=there, other=0)
    begin = tl.load(query_start_loc + seq, mask=there, other=0)
    count = tl.load(query_start_loc + seq + 1, mask=there, other=0) - begin
    tiles, blocks, _, _, _, _ = plan(
        length, count, sliding_window, most_splits, QUERIES, KEYS, WINDOW
    )
    return tiles * blocks


@triton.jit
def share_of(
    seq_lens, query_start_loc, num_seqs, sliding_window, most_splits, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The program's part of all work: an equal one for each, in the order of sequences.

    Returns (sequence that it begins in, work ahead of that sequence, where in it, end of the part).
    """
    total = tl.full((), 0, tl.int32)
    for start in tl.range(0, num_seqs, AT_ONCE):
        total += tl.sum(
            works_of(
                seq_lens, query_start_loc, start, num_seqs, sliding_window, most_splits,
                QUERIES, KEYS, WINDOW,
            ), 0,
        )  # fmt: skip
    whole = total.to(tl.int64)
    begin = (whole * tl.program_id(0) // tl.num_programs(0)).to(tl.int32)
    end = (whole * (tl.program_id(0) + 1) // tl.num_programs(0)).to(tl.int32)
    seq = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in tl.range(0, num_seqs, AT_ONCE):
        works = works_of(
            seq_lens, query_start_loc, start, num_seqs, sliding_window, most_splits,
            QUERIES, KEYS, WINDOW,
        )  # fmt: skip
        passed = seen + tl.cumsum(works, 0) <= begin
        seq += tl.sum((passed & (start + tl.arange(0, AT_ONCE) < num_seqs)).to(tl.int32), 0)
        before += tl.sum(tl.where(passed, works, 0), 0)
        seen += tl.sum(works, 0)
    return seq, before, begin - before, end


@triton.jit
def split_at(place, tile, blocks, first_block, width, first_split, splits):
    """The first split of a tile that begins at `place` or after it, in work of its sequence.

    Returns (its number, where it begins); with no such split `splits` and the next tile's begin.
    """
    within = place % blocks
    slot = tl.where(within == 0, 0, tl.cdiv(first_block + within, width) - first_split)
    begin = tl.maximum((first_split + slot) * width - first_block, 0)
    return slot, tile * blocks + tl.where(slot < splits, begin, blocks)
