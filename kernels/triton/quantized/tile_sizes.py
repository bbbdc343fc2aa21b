"""Tile sizes of the quantized products by number of rows: a table, not a search."""

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
    """Rows and columns of a program's part of the result, and its schedule."""

    rows: int
    columns: int
    warps: int
    stages: int


#: Maximum rows -> tile. A decode step waits for the weights: narrow tiles give every processor some
#: columns, and allow many loads at a time.
TABLE = {
    16: ProductTile(16, 32, 4, 5),
    64: ProductTile(64, 64, 4, 4),
    1 << 62: ProductTile(128, 128, 8, 3),
}
FOUR_BITS = {8: ProductTile(8, 64, 2, 5), 16: ProductTile(16, 64, 2, 5)}
"""The same for few rows with four-bit weights: a tile unpacks its weights once for all rows, with
as few threads as have enough registers.
"""
SMALL = ProductTile(16, 16, 1, 1)
"""The tile of the interpreter."""


NARROW = ProductTile(16, 16, 2, 8)
"""The tile for few rows of a layer with few columns."""


def narrowed(tile: ProductTile, target: Target, columns: int) -> ProductTile:
    """Return the tile for a single matrix with this many columns: NARROW if there would be fewer
    than two programs per processor.

    A single program leaves its processor waiting for memory. Dividing the columns differently
    doesn't change the result's bits, but splitting the depth would.
    """
    few = tile == TABLE[16] and triton.cdiv(columns, tile.columns) < 2 * target.processors
    return NARROW if few else tile


def product_tile(rows: int) -> ProductTile:
    """Return the tile for this many rows."""
    if INTERPRETED:
        return SMALL
    return next(tile for max_rows, tile in TABLE.items() if rows <= max_rows)


def four_bit_tile(tile: ProductTile, rows: int) -> ProductTile:
    """Return four-bit weights' tile for this many rows; `tile` is that of other formats."""
    if INTERPRETED:
        return tile
    return next((few for max_rows, few in FOUR_BITS.items() if rows <= max_rows), tile)


MAX_BLOCKS = 1024
"""Maximum blocks of a product with split depth: more than this fill any GPU."""
MIN_PAIRS = 1 if INTERPRETED else 8
"""Minimum pairs of groups in a split."""


def depth_splits(target: Target, blocks: int, pairs: int) -> int:
    """Return the number of parts of the depth for a product of few rows: 1, 2, 4 or 8.

    Each processor should have six programs of two warps: fewer leave it waiting for memory.
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
    """Return zeros in which programs count themselves, and which they reset. A device's products
    share them, since they run one after the other.
    """
    return torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)


@triton.jit
def block_of_program(pid, rows, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Return a program's (block of rows, block of columns), such that adjacent programs share
    inputs.
    """
    row_blocks = tl.cdiv(rows, BM)
    column_blocks: tl.constexpr = (COLUMNS + BN - 1) // BN
    band = pid // (8 * column_blocks)
    first = band * 8
    height = tl.minimum(row_blocks - first, 8)
    inside = pid % (8 * column_blocks)
    return first + inside % height, inside // height
