"""Timing on a GPU by events, and what the GPU can do at best, measured in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Run = Callable[[], object]
WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class GpuCeilings:
    """Bytes/s that a large copy moves (read and written), FLOP/s of a large bf16 product."""

    copy: float
    matmul: float


def median_seconds(run: Run, repeats: int = 20, flush: bool = True) -> float:
    """Median time of `run` on the device, by events, after a warm-up.

    With `flush` the L2 cache is overwritten before each run.
    """
    for _ in range(WARM_UPS):
        run()
    over = torch.empty(256 << 20, dtype=torch.uint8, device="cuda") if flush else None
    times = []
    for _ in range(repeats):
        if over is not None:
            over.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def _copy_rate(size: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), 10, flush=False)


def measure_ceilings(gigabytes: int = 2, size: int = 8192) -> GpuCeilings:
    """Copy `gigabytes` of memory, and multiply two `size` square bf16 matrices."""
    copy = _copy_rate(gigabytes << 30)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    seconds = median_seconds(lambda: torch.mm(a, b, out=out), 10, flush=False)
    return GpuCeilings(copy, 2 * size**3 / seconds)
