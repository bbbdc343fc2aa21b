"""Tile sizes of the quantised products by number of rows: a table, not a search."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import INTERPRETED, Target


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Rows and columns of the result that a program makes, and its schedule."""

    rows: int
    columns: int
    warps: int
    stages: int


#: Up to so many rows -> tile. A decode step waits for the weights: narrow tiles give every
#: processor some columns, and keep many loads under way.
TABLE = {
    16: ProductTile(16, 32, 4, 5),
    64: ProductTile(64, 64, 4, 4),
    1 << 62: ProductTile(128, 128, 8, 3),
}
FOUR_BITS = {8: ProductTile(8, 64, 2, 5), 16: ProductTile(16, 64, 2, 5)}
"""The same of weights in four bits, for few rows: unpacked once for all rows, by as few threads as
have the registers for it."""
SMALL = ProductTile(16, 16, 1, 1)
"""In the interpreter."""


NARROW = ProductTile(16, 16, 2, 8)
"""For few rows of a layer that has few columns."""


def narrowed(tile: ProductTile, target: Target, columns: int) -> ProductTile:
    """The tile for rows of one matrix with so many columns: NARROW, where there would be less than
    two programs for each processor.

    One alone leaves it waiting for memory; and columns that are cut in another way, unlike a depth
    that is split, change no bit of the result.
    """
    few = tile == TABLE[16] and triton.cdiv(columns, tile.columns) < 2 * target.processors
    return NARROW if few else tile


def product_tile(rows: int) -> ProductTile:
    """The tile for this many rows."""
    if INTERPRETED:
        return SMALL
    return next(tile for max_rows, tile in TABLE.items() if rows <= max_rows)


def four_bit_tile(tile: ProductTile, rows: int) -> ProductTile:
    """The tile of weights in four bits, of so many rows, where others have `tile`."""
    if INTERPRETED:
        return tile
    return next((few for max_rows, few in FOUR_BITS.items() if rows <= max_rows), tile)


MAX_BLOCKS = 1024
"""Blocks of a product whose depth is split, at most: more fill any GPU."""
MIN_PAIRS = 1 if INTERPRETED else 8
"""Pairs of groups of a split, at least."""


def depth_splits(target: Target, blocks: int, pairs: int) -> int:
    """Into how many parts the depth of a product of few rows goes: 1, 2, 4 or 8.

    So many that each processor has six programs of two warps: fewer leave it waiting for memory.
    """
    splits = 1
    while (
        blocks * splits < min(6 * target.processors, MAX_BLOCKS)
        and splits < 8
        and pairs >= 2 * splits * MIN_PAIRS
    ):
        splits *= 2
    return splits


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Zeros that programs count themselves in, and leave as zeros: products of a device come one
    after the other."""
    return torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)


@triton.jit
def block_of_program(pid, rows, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """(block of rows, block of columns) of a program, so that neighbours share what they read."""
    row_blocks = tl.cdiv(rows, BM)
    column_blocks: tl.constexpr = (COLUMNS + BN - 1) // BN
    band = pid // (8 * column_blocks)
    first = band * 8
    height = tl.minimum(row_blocks - first, 8)
    inside = pid % (8 * column_blocks)
    return first + inside % height, inside // height
