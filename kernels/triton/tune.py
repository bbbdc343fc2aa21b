"""`python -m kernels.triton.tune`: the best attention tile for each head size, on this GPU.

Offline: prints rows for `kernels.triton.attention.tiles.TABLE`, which are then checked in.
"""

from __future__ import annotations

import itertools
import sys

import torch
import triton

from kernels.bench.device_timing import median_seconds
from kernels.bench.gpu_cases import paged_batch
from kernels.triton.attention import paged_attention
from kernels.triton.attention.tiles import TABLE, Tile, architecture_of
from kernels.triton.launch import target_of

CANDIDATES = {
    "decode": [
        Tile(16, keys, warps, stages)
        for keys, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (3, 4, 6, 8))
    ],
    "prefill": [
        Tile(rows, keys, warps, stages)
        for rows, keys, warps, stages in itertools.product(
            (64, 128), (32, 64, 128), (4, 8), (2, 3, 4, 6)
        )
    ],
}
SHAPES = {"decode": (64, 1, 8192), "prefill": (1, 8192, 8192)}


def best_tile(phase: str, size: int) -> tuple[Tile, float]:
    """The fastest tile and its seconds, of those that fit the GPU."""
    device = torch.device("cuda")
    architecture = architecture_of(target_of(device))
    batch = paged_batch(
        *SHAPES[phase], heads=32, kv_heads=8, size=size, page=16, device="cuda"
    )  # fmt: skip
    found: list[tuple[float, Tile]] = []
    table = TABLE[architecture, phase]
    before = table[size]
    for tile in CANDIDATES[phase]:
        table[size] = tile
        try:
            seconds = median_seconds(lambda: paged_attention(*batch, size**-0.5), 10)
        except triton.runtime.errors.OutOfResources:
            continue
        found.append((seconds, tile))
        print(f"  {phase} {size} {tile}: {seconds * 1e6:.1f} us", flush=True)
    table[size] = before
    seconds, tile = min(found, key=lambda pair: pair[0])
    return tile, seconds


def main() -> int:
    """Print the best tiles; 2 without a GPU."""
    if not torch.cuda.is_available():
        print("torch sees no CUDA device.", file=sys.stderr)
        return 2
    for phase, size in itertools.product(CANDIDATES, (64, 128, 256)):
        tile, seconds = best_tile(phase, size)
        print(f"{phase} {size}: {tile}, {seconds * 1e6:.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
