"""How many threads the compiled kernels use."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import torch

from kernels.cpu.library import Library

_count: int | None = None


def use_threads(count: int) -> None:
    """Use `count` threads from now on, and leave torch one.

    Raises ValueError unless count is at least 1.
    """
    if count < 1:
        raise ValueError(f"the number of threads must be at least 1, got {count}")
    global _count
    _count = count
    torch.set_num_threads(1)


def bind_threads(library: Library, cpus: Sequence[int]) -> None:
    """Keep the calling thread to cpus[0] and the library's other threads to the following ones.

    Raises ValueError unless this process may run on all of them.
    """
    if not cpus:
        raise ValueError("cpus must name at least one CPU")
    if hasattr(os, "sched_getaffinity") and not os.sched_getaffinity(0).issuperset(cpus):
        raise ValueError(f"this thread may not run on all of the CPUs {list(cpus)}")
    if library.bind_threads((ctypes.c_int * len(cpus))(*cpus), len(cpus)):
        raise ValueError(f"the system refuses to bind threads to the CPUs {list(cpus)}")


def leave_threads(library: Library) -> None:
    """From now on let the system place the library's threads."""
    library.bind_threads(None, 0)


def num_threads() -> int:
    """What `use_threads` said, else as many as torch."""
    return _count or torch.get_num_threads()
