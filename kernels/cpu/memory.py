"""Threads and KV cache memory of the compiled kernels."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.library import Library

_num_threads: int | None = None


def use_threads(count: int) -> None:
    """Use `count` threads from now on, and one for torch.

    Raises ValueError unless count is at least 1.
    """
    if count < 1:
        raise ValueError(f"the number of threads must be at least 1, got {count}")
    global _num_threads
    _num_threads = count
    torch.set_num_threads(1)


def bind_threads(library: Library, cpus: Sequence[int]) -> None:
    """Bind the calling thread to cpus[0] and the library's other threads to the following ones.

    Raises ValueError unless this process may run on all of them.
    """
    if not cpus:
        raise ValueError("cpus must name at least one CPU")
    if hasattr(os, "sched_getaffinity") and not os.sched_getaffinity(0).issuperset(cpus):
        raise ValueError(f"this thread may not run on all of the CPUs {list(cpus)}")
    if library.bind_threads((ctypes.c_int * len(cpus))(*cpus), len(cpus)):
        raise ValueError(f"the system refuses to bind threads to the CPUs {list(cpus)}")


def leave_threads(library: Library) -> None:
    """Let the operating system schedule the library's threads from now on."""
    library.bind_threads(None, 0)


def num_threads() -> int:
    """Return the count of the last `use_threads`; torch's number of threads by default."""
    return _num_threads or torch.get_num_threads()


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros whose pages are mapped when they are first written, huge pages if possible.

    Blocks of a cache are read in any order. With small pages nearly every block costs an address
    translation, which slows down decode steps of many sequences.

    Raises MemoryError if the system refuses the size.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system refuses to map {size} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive until its last view is deleted.
    return torch.frombuffer(pages, dtype=dtype).view(shape)
