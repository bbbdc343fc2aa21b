"""Timing on a GPU by events, and what the GPU can do at best, measured in the same run."""

from __future__ import annotations

import functools
import time
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


def in_graph(run: Run) -> Run:
    """Record `run` on the GPU; what replays it. Raises what `run` raises while recording."""
    for _ in range(WARM_UPS):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def graphed_seconds(run: Run, device: str = "cuda") -> float:
    """Time `run` as an engine's steps have it: in a graph, so that nothing waits for the host."""
    return median_seconds(run if device == "cpu" else in_graph(run), device=device)


def median_seconds(run: Run, repeats: int = 20, flush: bool = True, device: str = "cuda") -> float:
    """Median time of `run` on the device, by events, after a warm-up.

    With `flush` the L2 cache is overwritten before each run. On a CPU, where only whether it works
    is of interest, the clock is asked, once.
    """
    if device == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    for _ in range(WARM_UPS):
        run()
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device=device) if flush else None
    times = []
    for _ in range(repeats):
        if flushed is not None:
            flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def _copy_rate(size: int, device: str) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    return 2 * size / median_seconds(copy, 10, flush=False, device=device)


def measure_ceilings(copied: int = 2 << 30, size: int = 8192, device: str = "cuda") -> GpuCeilings:
    """Copy so many bytes of memory, and multiply two `size` square bf16 matrices."""
    copy = _copy_rate(copied, device)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    seconds = median_seconds(lambda: torch.mm(a, b, out=out), 10, flush=False, device=device)
    return GpuCeilings(copy, 2 * size**3 / seconds)
