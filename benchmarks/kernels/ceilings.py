"""What this machine can do at best, measured in the same run as the kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.cpu.library import Library
from kernels.cpu.memory import lazy_zeros, num_threads

MEGABYTES = 512
NUM_CHUNKS = 200


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Memory reads in bytes/s; float32 multiply-adds in registers in FLOP/s."""

    read: float
    flops: float


def measure(library: Library, repeats: int = 7) -> Ceilings:
    """The best of `repeats` runs each."""
    block = lazy_zeros((MEGABYTES << 18,), torch.float32).fill_(1.0)
    read = best(lambda: library.read_memory(block.data_ptr(), block.nbytes, num_threads()), repeats)
    multiply = best(lambda: library.multiply(NUM_CHUNKS, num_threads()), repeats)
    operations = NUM_CHUNKS * 100_000 * 24 * library.vector_bits() // 32
    return Ceilings(block.nbytes / read, operations / multiply)


def best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
