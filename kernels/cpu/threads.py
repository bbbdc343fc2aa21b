"""How many threads the compiled kernels use."""

from __future__ import annotations

import torch

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


def num_threads() -> int:
    """What `use_threads` said, else as many as torch."""
    return _count or torch.get_num_threads()
