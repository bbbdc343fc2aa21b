"""Attention's tile sizes by architecture, head size and phase: a table, not a search.

A tile has ROWS rows of (query, head of a group) and KEYS keys. `python -m tools.triton.tune`
measures candidates on a GPU and prints the rows for this table; nothing is tuned while serving.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton

from kernels.triton.launch import Target

MAX_SPLITS = 64
SHARED_8 = 166_912
"""Bytes of shared memory per program on 8.0; 8.6, 8.9 and 12.0 have 101,376."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile size and schedule of a kernel.

    Attributes:
        registers: limit per thread, so that one more program fits on each processor almost without
            spilling.
        programs: number of programs that run on a processor at a time, at least; with split keys
            exactly this many are launched per processor.
        ahead: stages if a block's keys are multiplied before the previous block's values; 0 to
            never do so.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    programs: int = 1
    ahead: int = 0


AMD = 0
"""The key of AMD GPUs: 64 KiB of shared memory, shared by 2 stages of keys and values, and twice as
many registers for a program of 8 waves.
"""

#: (architecture, phase) -> padded head size -> tile, for 16-bit operands. The head size is the
#: largest that the row serves. Triton spends every second stage on the page table lookup: of n
#: stages, (n - 1) // 2 hold keys and values. Decode, which only waits for memory, needs two.
TABLE: dict[tuple[int, str], dict[int, Tile]] = {
    (AMD, "prefill"): {
        64: Tile(128, 64, 4, 2),
        128: Tile(128, 32, 4, 2),
        256: Tile(64, 32, 4, 1),
    },
    (AMD, "decode"): {
        64: Tile(16, 64, 2, 2, None, 2),
        128: Tile(16, 32, 2, 2, None, 2),
        256: Tile(16, 32, 4, 1, None, 1),
    },
    (8, "prefill"): {
        64: Tile(128, 64, 8, 5),
        128: Tile(128, 32, 8, 5),
        256: Tile(64, 32, 8, 3),
    },
    (8, "decode"): {
        64: Tile(16, 64, 4, 6, None, 2),
        128: Tile(16, 32, 4, 6, None, 2),
        256: Tile(16, 32, 4, 4, None, 1),
    },
    (9, "prefill"): {
        64: Tile(128, 128, 8, 5, ahead=3),
        128: Tile(128, 128, 8, 5, ahead=3),
        256: Tile(128, 32, 8, 7, ahead=5),
    },
    (9, "decode"): {
        64: Tile(16, 128, 4, 6, None, 3),
        128: Tile(16, 64, 4, 6, 168, 3),
        256: Tile(16, 32, 4, 6, None, 2),
    },
    (10, "prefill"): {
        64: Tile(128, 128, 8, 3),
        128: Tile(128, 64, 8, 3),
        256: Tile(128, 32, 8, 3),
    },
    (10, "decode"): {
        64: Tile(16, 128, 4, 6, None, 3),
        128: Tile(16, 64, 4, 6, 168, 3),
        256: Tile(16, 32, 4, 6, None, 2),
    },
}
WIDE = {"prefill": Tile(32, 32, 8, 1), "decode": Tile(16, 32, 4, 1)}
"""float32 operands are multiplied as three tf32 parts, which leaves few registers."""

INTERPRETED = {"prefill": Tile(32, 32, 1, 1, ahead=1), "decode": Tile(16, 32, 1, 1)}


def architecture_of(target: Target) -> int:
    """Return the table's key of a device: that of 8.0 if its shared memory is no larger."""
    if target.gfx:
        return AMD
    return min(10, max(8, target.capability // 10)) if target.shared > SHARED_8 else 8


def tile_for(
    target: Target, phase: str, padded: int, min_rows: int, itemsize: int, cache_itemsize: int = 2
) -> Tile:
    """Return the tile for queries of `itemsize` bytes. It has at least `min_rows` rows, which cover
    a group of heads.
    """
    if target.interpreted:
        tile = INTERPRETED[phase]
    elif itemsize == 4:
        tile = WIDE[phase] if padded <= 128 else Tile(16, 16, 8, 1)
    else:
        sizes = TABLE[architecture_of(target), phase]
        tile = sizes[min(size for size in sizes if size >= min(padded, max(sizes)))]
    rows = tile.rows
    while rows < min_rows:
        rows *= 2
    if target.interpreted:
        return replace(tile, rows=rows)
    if rows > tile.rows:
        # A warp has at most 16 rows: sums of more don't fit its registers.
        warps = max(tile.warps, min(16, rows // 16))
        programs = 2 if rows <= 64 and architecture_of(target) >= 9 else 1
        return replace(tile, rows=rows, warps=warps, registers=None, programs=programs)
    if itemsize == 2 and cache_itemsize != 2 and phase == "prefill":
        # Converting keys and values takes registers.
        return replace(tile, keys=min(64, tile.keys))
    return tile


def max_splits(target: Target, kv_heads: int) -> int:
    """Return the maximum number of splits of a sequence's keys, a power of two in [16, 64].

    One sequence alone can keep all processors busy. The number doesn't depend on the batch, so that
    a sequence is split the same way in each.
    """
    num_splits = max(1, target.processors // kv_heads)
    return min(MAX_SPLITS, max(16, 1 << (num_splits.bit_length() - 1)))


def prompt_splits(target: Target, kv_heads: int, programs: int) -> int:
    """Return the maximum for prompts whose `programs` programs would leave processors idle.

    There are just enough for four parts per processor: each part is a float32 row per query and
    head, and 16 parts of a prompt of a thousand tokens take hundreds of megabytes.
    """
    num_splits = triton.next_power_of_2(triton.cdiv(4 * target.processors, max(1, programs)))
    return min(max_splits(target, kv_heads), max(2, num_splits))


def programs_for(target: Target, tile: Tile, kv_heads: int) -> int:
    """Return the number of programs per KV head that share a batch's splits: all run at once."""
    return max(1, target.processors * tile.programs // kv_heads)
