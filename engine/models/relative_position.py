"""Buckets of distances between tokens (T5, arXiv 1910.10683), and sinusoidal position tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def logarithmic_bucket(distance: Tensor, exact: int, num_buckets: int, max_distance: int) -> Tensor:
    """Return the buckets of distances >= 0, int64 [...]: a separate bucket for each below `exact`,
    then growing ones, the last of which has all distances from `max_distance` on.
    """
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (growth * (num_buckets - exact)).long().clamp(max=num_buckets - exact - 1)
    return torch.where(distance < exact, distance, far)


def sinusoidal_positions(num_positions: int, size: int, kind: str, first: int = 0) -> Tensor:
    """Return float32 [num_positions, size], sines, then cosines, of positions from `first` on.

    Frequencies fall to 1 / 10,000, which is the last one for "fairseq", and would follow the last
    one for "marian" (arXiv 1706.03762). `size` is even.
    """
    steps = size // 2 - (kind == "fairseq")
    frequency = torch.exp(torch.arange(size // 2).double() * (-math.log(10_000.0) / steps))
    angle = torch.arange(first, first + num_positions).double()[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), dim=1).float()
