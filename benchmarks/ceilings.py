"""What this machine can do: the figures that a benchmark's percentages refer to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.kernels.ceilings import best as _best
from benchmarks.kernels.ceilings import measure as measure_kernels
from kernels.cpu import CpuKernels, CpuKernelsUnavailable


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits: memory reads in bytes/s, float32 multiply-adds in FLOP/s."""

    read_bandwidth: float
    sgemm_flops: float


def measure(megabytes: int = 512, size: int = 1536, repeats: int = 5) -> Ceilings:
    """What the kernels' own threads read and multiply; without a compiler, what torch's do."""
    try:
        kernels = measure_kernels(CpuKernels().library, repeats)
    except CpuKernelsUnavailable:
        return _measure_torch(megabytes, size, repeats)
    return Ceilings(kernels.read, kernels.flops)


def _measure_torch(megabytes: int, size: int, repeats: int) -> Ceilings:
    """Read `megabytes` of memory (far over the caches) and multiply two `size` square matrices."""
    block = torch.ones(megabytes * (1 << 20) // 4)
    read = _best(block.sum, repeats)
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    multiply = _best(lambda: torch.mm(a, b, out=out), repeats)
    return Ceilings(block.nbytes / read, 2 * size**3 / multiply)
