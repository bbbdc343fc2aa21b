"""`python -m kernels.triton.tune`: the best attention tile for each head size, on this GPU.

Offline: prints rows for `kernels.triton.attention.tiles.TABLE`, which are then checked in. Each
candidate must give what the tile of the table gives. `--smoke` tries two small ones on any device.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import triton

from kernels.bench.device_timing import median_seconds
from kernels.bench.gpu_case import compare
from kernels.bench.gpu_cases import paged_batch
from kernels.triton.attention import paged_attention
from kernels.triton.attention.tiles import INTERPRETED, TABLE, Tile, architecture_of
from kernels.triton.launch import target_of

CANDIDATES = {
    "decode": [
        Tile(16, keys, warps, stages, registers)
        for keys, warps, stages, registers in itertools.product(
            (32, 64, 128), (2, 4, 8), (3, 4, 6, 8), (None, 168)
        )
    ],
    "prefill": [
        Tile(rows, keys, warps, stages)
        for rows, keys, warps, stages in itertools.product(
            (64, 128), (32, 64, 128), (4, 8), (2, 3, 4, 6)
        )
    ],
}
SHAPES = {"decode": (64, 1, 8192), "prefill": (1, 8192, 8192)}
SMALL_SHAPES = {"decode": (2, 1, 40), "prefill": (1, 20, 20)}
SMALL = [Tile(16, 16, 1, 1), Tile(16, 32, 1, 1)]


@contextmanager
def in_place(phase: str, size: int, device: torch.device, tile: Tile) -> Iterator[None]:
    """Within it, batches of the phase are cut up by this tile."""
    if device.type == "cpu":
        table, key = INTERPRETED, phase
        before = table[key]
        table[key] = tile
        try:
            yield
        finally:
            table[key] = before
        return
    sizes = TABLE[architecture_of(target_of(device)), phase]
    kept = sizes[size]
    sizes[size] = tile
    try:
        yield
    finally:
        sizes[size] = kept


def best_tile(phase: str, size: int, tiles: Iterable[Tile], device: torch.device) -> Tile:
    """The fastest tile of those that fit the GPU; prints the time of each."""
    small = device.type == "cpu"
    heads, kv_heads = (4, 2) if small else (32, 8)
    batch = paged_batch(
        *(SMALL_SHAPES if small else SHAPES)[phase], heads=heads, kv_heads=kv_heads, size=size,
        page=16, device=device.type,
    )  # fmt: skip
    expected = paged_attention(*batch, size**-0.5)
    found: list[tuple[float, Tile]] = []
    for tile in tiles:
        with in_place(phase, size, device, tile):
            try:
                compare(paged_attention(*batch, size**-0.5), expected, 1e-2)
            except triton.runtime.errors.OutOfResources:
                continue
            seconds = median_seconds(
                lambda: paged_attention(*batch, size**-0.5), 10, device=device.type
            )
        found.append((seconds, tile))
        print(f"  {phase} {size} {tile}: {seconds * 1e6:.1f} us", flush=True)
    return min(found, key=lambda pair: pair[0])[1]


def main() -> int:
    """Print the best tiles; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.tune", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two small tiles, on any device")
    smoke = parser.parse_args().smoke
    if not smoke and not torch.cuda.is_available():
        print("torch sees no CUDA device.", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for phase, size in itertools.product(CANDIDATES, (64,) if smoke else (64, 128, 256)):
        tiles = SMALL if smoke else CANDIDATES[phase]
        print(f"{phase} {size}: {best_tile(phase, size, tiles, device)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
