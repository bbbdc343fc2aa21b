"""Memory for KV caches."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from kernels.ablations import is_on


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
        pages.madvise(mmap.MADV_HUGEPAGE if is_on("huge-pages") else mmap.MADV_NOHUGEPAGE)
    # The tensor holds on to the mapping, which goes when the last view of it does.
    return torch.frombuffer(pages, dtype=dtype).view(shape)
