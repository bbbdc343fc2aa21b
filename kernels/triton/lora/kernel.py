"""Shrink and expand (Chen et al. 2023, "Punica"; Sheng et al. 2023, "S-LoRA").

Neither grid depends on which adapters a batch has: programs walk over as many tiles of rows as the
device's memory says there are. An adapter is an entry of eight numbers in a table.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Numbers of an entry: the addresses of A, B, B's blocks and the factors of h; the padded rank;
#: the addresses of gain and shift, 0 for none; 1 where the adapter changes this layer, else 0.
FIELDS = 8
#: Ranks that are multiplied at once: the parts of an adapter are padded to it.
RANKS = tl.constexpr(16)
#: Columns of a block of B.
COLUMN_BLOCK = 64


@triton.jit(do_not_specialize=("tokens",))
def shrink_kernel(
    h,
    x,
    table,
    order,
    owners,
    count,
    tokens,
    x_stride,
    width,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (programs of ranks, programs of tiles, SPLITS): h[split, row] = factors * x[row] A^T,
    each split's the sum over its part of the depth; h float32 [SPLITS, tokens, width].
    """
    share: tl.constexpr = (DEPTH + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, DEPTH)
    depth = tl.arange(0, BLOCK_K)
    each = tl.arange(0, RANKS)
    for tile in tl.range(tl.program_id(1), tl.load(count), tl.num_programs(1)):
        entry = table + tl.load(owners + tile).to(tl.int64) * 8
        matrix = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
        factors = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
        ranks = tl.load(entry + 4).to(tl.int32)
        row = tl.load(order + tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        there = row >= 0
        left = x + row[:, None] * x_stride + depth[None, :]
        for rank in tl.range(tl.program_id(0) * RANKS, ranks, tl.num_programs(0) * RANKS):
            right = matrix + (rank + each)[None, :].to(tl.int64) * DEPTH + depth[:, None]
            if DEPTH % 16 == 0:
                # Of an address from a table the compiler knows nothing: torch aligns all.
                right = tl.multiple_of(right, (16, 16))
            total = tl.zeros((TILE, RANKS), tl.float32)
            for start in tl.range(first, last, BLOCK_K):
                if DEPTH % BLOCK_K == 0:
                    a = tl.load(left + start, mask=there[:, None], other=0.0)
                    b = tl.load(right + start)
                else:
                    inside = start + depth < DEPTH
                    a = tl.load(left + start, mask=there[:, None] & inside[None, :], other=0.0)
                    b = tl.load(right + start, mask=inside[:, None], other=0.0)
                if UPCAST:
                    a = a.to(tl.float32)
                    b = b.to(tl.float32)
                total = tl.dot(a, b, total, input_precision=PRECISION)
            total *= tl.load(factors + rank + each)[None, :]
            to = (tl.program_id(2).to(tl.int64) * tokens + row) * width
            tl.store(h + to[:, None] + (rank + each)[None, :], total, mask=there[:, None])


@triton.jit(do_not_specialize=("tokens",))
def expand_kernel(
    y,
    h,
    table,
    order,
    owners,
    count,
    tokens,
    y_stride,
    width,
    dtype,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (blocks of columns, programs of tiles): y[row] = gain * (y[row] + h[row] B^T) + shift.

    A block of B is [BLOCK_N, ranks], and meets the ranks of h from `start` on: three numbers say
    where it is, `start` and `ranks`. `dtype`: any pointer to numbers of B's kind.
    """
    block = tl.program_id(0)
    own = tl.arange(0, BLOCK_N)
    column = block * BLOCK_N + own
    wanted = column < COLUMNS
    each = tl.arange(0, RANKS)
    for tile in tl.range(tl.program_id(1), tl.load(count), tl.num_programs(1)):
        entry = table + tl.load(owners + tile).to(tl.int64) * 8
        if tl.load(entry + 7) != 0:
            row = tl.load(order + tile * TILE + tl.arange(0, TILE)).to(tl.int64)
            inside = (row >= 0)[:, None] & wanted[None, :]
            to = y + row[:, None] * y_stride + column[None, :]
            total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
            place = tl.load(entry + 2).to(tl.pointer_type(tl.int32)) + block * 3
            offset = tl.multiple_of(tl.load(place), 16)
            start = tl.multiple_of(tl.load(place + 1), 16)
            ranks = tl.multiple_of(tl.load(place + 2), 16)
            matrix = tl.load(entry + 1).to(tl.pointer_type(dtype.dtype.element_ty))
            right = matrix + offset + own[None, :] * ranks + each[:, None]
            right = tl.multiple_of(right, (16, 16))
            left = h + row[:, None] * width + start + each[None, :]
            for rank in tl.range(0, ranks, RANKS):
                low = tl.zeros((TILE, RANKS), tl.float32)
                for split in range(SPLITS):
                    part = left + split * tokens.to(tl.int64) * width + rank
                    low += tl.load(part, mask=(row >= 0)[:, None], other=0.0)
                b = tl.load(right + rank)
                a = low.to(b.dtype)
                if UPCAST:
                    a = a.to(tl.float32)
                    b = b.to(tl.float32)
                total = tl.dot(a, b, total, input_precision=PRECISION)
            gain = tl.load(entry + 5)
            if gain != 0:
                at = gain.to(tl.pointer_type(tl.float32)) + column
                total *= tl.load(at, mask=wanted, other=0.0)[None, :]
            shift = tl.load(entry + 6)
            if shift != 0:
                at = shift.to(tl.pointer_type(tl.float32)) + column
                total += tl.load(at, mask=wanted, other=0.0)[None, :]
            tl.store(to, total.to(y.dtype.element_ty), mask=inside)
