"""Shrink and expand (Chen et al. 2023, "Punica"; Sheng et al. 2023, "S-LoRA").

Grids don't depend on a batch's adapters: programs loop over as many tiles of rows as a counter in
device memory says.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Linear layers and experts look up the entry of a tile's rows differently, and share the rest.

#: Numbers per entry.
FIELDS = tl.constexpr(8)
#: Indices of the numbers: addresses of A, B, B's blocks and the factors of h; the padded rank;
#: addresses of gain and shift, 0 for none; 1 if the adapter changes the layer, else 0.
INNER = tl.constexpr(0)
OUTER = tl.constexpr(1)
BLOCKS = tl.constexpr(2)
FACTORS = tl.constexpr(3)
RANK = tl.constexpr(4)
GAIN = tl.constexpr(5)
SHIFT = tl.constexpr(6)
CHANGES = tl.constexpr(7)
#: Ranks that are multiplied together; slices of an adapter are padded to a multiple.
RANKS = tl.constexpr(16)
#: Columns of a block of B.
COLUMN_BLOCK = 64


@triton.jit
def entry_of(table, number):
    """Return the address of an entry."""
    return table + number.to(tl.int64) * FIELDS


@triton.jit
def shrink_rows(
    h, x, entry, source, row, row_mask, rows, x_stride, width,
    DEPTH: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """h[split, row] = factors * x[source] A^T for the rows of a tile in `row_mask`.

    Programs along the grid's first dimension share the ranks, those along its third the depth: each
    sums its own part. h is float32 [SPLITS, rows, width].
    """
    share: tl.constexpr = (DEPTH + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, DEPTH)
    depth = tl.arange(0, BLOCK_K)
    lanes = tl.arange(0, RANKS)
    matrix = tl.load(entry + INNER).to(tl.pointer_type(x.dtype.element_ty))
    factors = tl.load(entry + FACTORS).to(tl.pointer_type(tl.float32))
    ranks = tl.load(entry + RANK).to(tl.int32)
    lhs = x + source[:, None] * x_stride + depth[None, :]
    for rank in tl.range(tl.program_id(0) * RANKS, ranks, tl.num_programs(0) * RANKS):
        rhs = matrix + (rank + lanes)[None, :].to(tl.int64) * DEPTH + depth[:, None]
        if DEPTH % 16 == 0:
            # The compiler can't know the alignment of an address from a table; torch aligns all
            # tensors.
            rhs = tl.multiple_of(rhs, (16, 16))
        total = tl.zeros((TILE, RANKS), tl.float32)
        for start in tl.range(first, last, BLOCK_K):
            if DEPTH % BLOCK_K == 0:
                a = tl.load(lhs + start, mask=row_mask[:, None], other=0.0)
                b = tl.load(rhs + start)
            else:
                inside = start + depth < DEPTH
                a = tl.load(lhs + start, mask=row_mask[:, None] & inside[None, :], other=0.0)
                b = tl.load(rhs + start, mask=inside[:, None], other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        total *= tl.load(factors + rank + lanes)[None, :]
        to = (tl.program_id(2).to(tl.int64) * rows + row) * width
        tl.store(h + to[:, None] + (rank + lanes)[None, :], total, mask=row_mask[:, None])


@triton.jit
def expand_rows(
    total, h, entry, row, row_mask, block, rows, width, dtype,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return total [TILE, BLOCK_N] + h[row] B^T for one block of B's columns.

    A block of B is [BLOCK_N, ranks], for the ranks of h from `start` on. Three numbers describe it:
    its offset, `start` and `ranks`. `dtype`: any pointer to B's dtype.
    """
    columns = tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, RANKS)
    block_entry = tl.load(entry + BLOCKS).to(tl.pointer_type(tl.int32)) + block * 3
    offset = tl.multiple_of(tl.load(block_entry), 16)
    start = tl.multiple_of(tl.load(block_entry + 1), 16)
    ranks = tl.multiple_of(tl.load(block_entry + 2), 16)
    matrix = tl.load(entry + OUTER).to(tl.pointer_type(dtype.dtype.element_ty))
    rhs = matrix + offset + columns[None, :] * ranks + lanes[:, None]
    rhs = tl.multiple_of(rhs, (16, 16))
    lhs = h + row[:, None] * width + start + lanes[None, :]
    for rank in tl.range(0, ranks, RANKS):
        low = tl.zeros((TILE, RANKS), tl.float32)
        for split in range(SPLITS):
            part = lhs + split * rows.to(tl.int64) * width + rank
            low += tl.load(part, mask=row_mask[:, None], other=0.0)
        b = tl.load(rhs + rank)
        a = low.to(b.dtype)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


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
    """h[split, row] = factors * x[row] A^T. Grid (programs of ranks, programs of tiles, SPLITS).

    Each split sums its part of the depth; h is float32 [SPLITS, tokens, width].
    """
    for tile in tl.range(tl.program_id(1), tl.load(count), tl.num_programs(1)):
        entry = entry_of(table, tl.load(owners + tile))
        row = tl.load(order + tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        shrink_rows(
            h, x, entry, row, row, row >= 0, tokens, x_stride, width,
            DEPTH, TILE, BLOCK_K, SPLITS, PRECISION, UPCAST,
        )  # fmt: skip


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
    """y[row] = gain * (y[row] + h[row] B^T) + shift. Grid (blocks of columns, programs of tiles).

    `dtype`: any pointer to B's dtype.
    """
    block = tl.program_id(0)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < COLUMNS
    for tile in tl.range(tl.program_id(1), tl.load(count), tl.num_programs(1)):
        entry = entry_of(table, tl.load(owners + tile))
        if tl.load(entry + CHANGES) != 0:
            row = tl.load(order + tile * TILE + tl.arange(0, TILE)).to(tl.int64)
            inside = (row >= 0)[:, None] & column_mask[None, :]
            to = y + row[:, None] * y_stride + column[None, :]
            total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
            total = expand_rows(
                total, h, entry, row, row >= 0, block, tokens, width, dtype,
                TILE, BLOCK_N, SPLITS, PRECISION, UPCAST,
            )  # fmt: skip
            gain = tl.load(entry + GAIN)
            if gain != 0:
                pointers = gain.to(tl.pointer_type(tl.float32)) + column
                total *= tl.load(pointers, mask=column_mask, other=0.0)[None, :]
            shift = tl.load(entry + SHIFT)
            if shift != 0:
                pointers = shift.to(tl.pointer_type(tl.float32)) + column
                total += tl.load(pointers, mask=column_mask, other=0.0)[None, :]
            tl.store(to, total.to(y.dtype.element_ty), mask=inside)
