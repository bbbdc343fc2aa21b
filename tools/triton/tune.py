"""`python -m tools.triton.tune`: the best attention tile for each head size, on this GPU.

Offline: prints rows for `kernels.triton.attention.tile_sizes.TABLE`, which are then checked in.
Each
candidate must give what the tile of the table gives. Candidates are compiled side by side first.
`--phase` and `--size` choose a part: decode, one head size, takes some minutes. `--smoke` tries
two small tiles on any device.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

from benchmarks.kernels.device_timing import graphed_seconds
from benchmarks.kernels.gpu_case import compare
from benchmarks.kernels.gpu_cases import paged_batch
from kernels.attention_args import AttentionArgs
from kernels.triton.attention import paged_attention
from kernels.triton.attention.tile_sizes import INTERPRETED, TABLE, Tile, architecture_of
from kernels.triton.launch import INTERPRETED as IN_INTERPRETER
from kernels.triton.launch import no_device, target_of, watch

CANDIDATES = {
    "decode": [
        Tile(16, keys, warps, stages, registers)
        for keys, warps, stages, registers in itertools.product(
            (32, 64, 128), (2, 4, 8), (3, 4, 6, 8), (None, 168)
        )
    ],
    "prefill": [
        Tile(rows, keys, warps, stages, ahead=stages if ahead else 0)
        for rows, keys, warps, stages, ahead in itertools.product(
            (64, 128), (32, 64, 128), (4, 8), (3, 5, 7), (False, True)
        )
    ],
}
SIZES = (64, 128, 256)
SHAPES = {"decode": (64, 1, 8192), "prefill": (1, 8192, 8192)}
SMALL_SHAPES = {"decode": (2, 1, 40), "prefill": (1, 20, 20)}
SMALL = [Tile(16, 16, 1, 1), Tile(16, 32, 1, 1)]


@contextmanager
def in_place(phase: str, size: int, device: torch.device, tile: Tile) -> Iterator[None]:
    """Within it, batches of the phase are cut up by this tile."""
    if device.type == "cpu":
        table, key = INTERPRETED, phase
        previous_tile = table[key]
        table[key] = tile
        try:
            yield
        finally:
            table[key] = previous_tile
        return
    sizes = TABLE[architecture_of(target_of(device)), phase]
    previous_size = sizes[size]
    sizes[size] = tile
    try:
        yield
    finally:
        sizes[size] = previous_size


def compile_side_by_side(
    runs: Sequence[Callable[[], object]], device: torch.device, threads: int | None = None
) -> int:
    """Compile what the runs would launch, on so many threads (None: a CPU's); how many launches.

    Most of the work lets go of Python's lock. What can't be compiled says so when it is run.
    """
    launches: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
    target = target_of(device)
    for run in runs:
        with watch(lambda *launch: launches.append(launch), target):
            run()
    with (
        ThreadPoolExecutor(threads or os.cpu_count()) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for kernel, grid, args, options in launches:
            kernel.warmup(*args, grid=grid, **options)
    return len(launches)


def best_tile(phase: str, size: int, tiles: Sequence[Tile], device: torch.device) -> Tile:
    """The fastest tile of those that fit the GPU; prints the time of each."""
    small = device.type == "cpu"
    heads, kv_heads = (4, 2) if small else (32, 8)
    batch = paged_batch(
        *(SMALL_SHAPES if small else SHAPES)[phase], heads=heads, kv_heads=kv_heads, size=size,
        page=16, device=device.type,
    )  # fmt: skip

    def attend_by(tile: Tile) -> torch.Tensor:
        with in_place(phase, size, device, tile):
            return paged_attention(AttentionArgs(*batch, size**-0.5))

    if not IN_INTERPRETER:
        compile_side_by_side([functools.partial(attend_by, tile) for tile in tiles], device)
    expected = paged_attention(AttentionArgs(*batch, size**-0.5))
    timings: list[tuple[float, Tile]] = []
    for tile in tiles:
        with in_place(phase, size, device, tile):
            try:
                compare(paged_attention(AttentionArgs(*batch, size**-0.5)), expected, 1e-2)
            except triton.runtime.errors.OutOfResources:
                continue
            seconds = graphed_seconds(
                lambda: paged_attention(AttentionArgs(*batch, size**-0.5)), device.type
            )
        timings.append((seconds, tile))
        print(f"  {phase} {size} {tile}: {seconds * 1e6:.1f} us", flush=True)
    return min(timings, key=lambda pair: pair[0])[1]


def main() -> int:
    """Print the best tiles; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tools.triton.tune", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two small tiles, on any device")
    parser.add_argument("--phase", choices=sorted(CANDIDATES), help="one of the two alone")
    parser.add_argument("--size", type=int, choices=SIZES, help="of the heads; one alone")
    options = parser.parse_args()
    smoke = options.smoke
    obstacle = no_device(interpreted=smoke)
    if obstacle:
        print(obstacle, file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    phases = [options.phase] if options.phase else list(CANDIDATES)
    sizes = [options.size] if options.size else SIZES[:1] if smoke else SIZES
    for phase, size in itertools.product(phases, sizes):
        tiles = SMALL if smoke else CANDIDATES[phase]
        print(f"{phase} {size}: {best_tile(phase, size, tiles, device)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
