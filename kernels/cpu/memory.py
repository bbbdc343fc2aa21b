"""Memory for KV caches."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

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


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system maps when they are first written, in huge pages where it can.

    A cache is read block after block in any order: with small pages nearly every block costs an
    address translation, which a decode step of many sequences feels.

    Raises MemoryError for more than the system may ever have.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system doesn't give {size} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    # The tensor holds on to the mapping, which goes when the last view of it does.
    return torch.frombuffer(pages, dtype=dtype).view(shape)
