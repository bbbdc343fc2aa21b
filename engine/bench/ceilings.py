"""What this machine can do: the figures that a benchmark's percentages refer to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits: memory reads in bytes/s, float32 matrix products in FLOP/s."""

    read_bandwidth: float
    sgemm_flops: float


def _best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(megabytes: int = 512, size: int = 1536, repeats: int = 5) -> Ceilings:
    """Read `megabytes` of memory (far over the caches) and multiply two `size` square matrices."""
    block = torch.ones(megabytes * (1 << 20) // 4)
    read = _best(block.sum, repeats)
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    multiply = _best(lambda: torch.mm(a, b, out=out), repeats)
    return Ceilings(block.nbytes / read, 2 * size**3 / multiply)
