"""How the quantised products are cut up, by their number of rows: a table, not a search."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kernels.triton.launch import INTERPRETED


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
SMALL = ProductTile(16, 16, 1, 1)
"""In the interpreter."""


def product_tile(rows: int) -> ProductTile:
    """The tile for so many rows."""
    if INTERPRETED:
        return SMALL
    return next(tile for most, tile in TABLE.items() if rows <= most)


@triton.jit
def place_of(pid, rows, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """(block of rows, block of columns) of a program, so that neighbours share what they read."""
    row_blocks = tl.cdiv(rows, BM)
    column_blocks: tl.constexpr = (COLUMNS + BN - 1) // BN
    band = pid // (8 * column_blocks)
    first = band * 8
    height = tl.minimum(row_blocks - first, 8)
    inside = pid % (8 * column_blocks)
    return first + inside % height, inside // height
