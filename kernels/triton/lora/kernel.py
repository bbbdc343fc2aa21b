"""Shrink and expand (Chen et al. 2023, "Punica"; Sheng et al. 2023, "S-LoRA").

Neither grid depends on which adapters a batch has: programs walk over as many tiles of rows as the
device's memory says there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.lora.entry import CHANGES, GAIN, SHIFT, entry_of, expand_rows, shrink_rows


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
    """Grid (blocks of columns, programs of tiles): y[row] = gain * (y[row] + h[row] B^T) + shift.

    `dtype`: any pointer to numbers of B's kind.
    """
    block = tl.program_id(0)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = column < COLUMNS
    for tile in tl.range(tl.program_id(1), tl.load(count), tl.num_programs(1)):
        entry = entry_of(table, tl.load(owners + tile))
        if tl.load(entry + CHANGES) != 0:
            row = tl.load(order + tile * TILE + tl.arange(0, TILE)).to(tl.int64)
            inside = (row >= 0)[:, None] & wanted[None, :]
            to = y + row[:, None] * y_stride + column[None, :]
            total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
            total = expand_rows(
                total, h, entry, row, row >= 0, block, tokens, width, dtype,
                TILE, BLOCK_N, SPLITS, PRECISION, UPCAST,
            )  # fmt: skip
            gain = tl.load(entry + GAIN)
            if gain != 0:
                at = gain.to(tl.pointer_type(tl.float32)) + column
                total *= tl.load(at, mask=wanted, other=0.0)[None, :]
            shift = tl.load(entry + SHIFT)
            if shift != 0:
                at = shift.to(tl.pointer_type(tl.float32)) + column
                total += tl.load(at, mask=wanted, other=0.0)[None, :]
            tl.store(to, total.to(y.dtype.element_ty), mask=inside)
