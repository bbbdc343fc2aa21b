"""Distances between tokens in buckets (T5, arXiv 1910.10683), and tables of positions as sines."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def logarithmic_bucket(distance: Tensor, exact: int, num_buckets: int, max_distance: int) -> Tensor:
    """Buckets of distances, int64 [...], at least 0: one each below `exact`, then growing ones, the
    last of which has all from `max_distance` on.
    """
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (growth * (num_buckets - exact)).long().clamp(max=num_buckets - exact - 1)
    return torch.where(distance < exact, distance, far)


def sinusoidal_positions(num_positions: int, size: int, kind: str, first: int = 0) -> Tensor:
    """float32 [num_positions, size]: sines, then cosines, of positions from `first` on, whose
    frequencies fall to 1 / 10,000: behind the last one ("marian", arXiv 1706.03762), or with it
    ("fairseq"). `size` is even.
    """
    steps = size // 2 - (kind == "fairseq")
    frequency = torch.exp(torch.arange(size // 2).double() * (-math.log(10_000.0) / steps))
    angle = torch.arange(first, first + num_positions).double()[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), dim=1).float()
