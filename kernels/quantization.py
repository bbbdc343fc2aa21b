"""What the implementations of quantised linear layers agree on."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZES = {"int8": 128, "int4": 32}
"""Neighbours of a row that share a scale, by default."""

MOST = 256


def group_size_for(quantization: str, group_size: int | None) -> int:
    """The group size to use. Raises ValueError for what no kernel has."""
    if quantization not in GROUP_SIZES:
        known = ", ".join(GROUP_SIZES)
        raise ValueError(f"quantization must be one of {known}; got {quantization!r}")
    group = GROUP_SIZES[quantization] if group_size is None else group_size
    if group < 16 or group > MOST or group % 16:
        raise ValueError(f"group_size must be a multiple of 16 in [16, {MOST}], got {group}")
    return group


def check_integers(values: Tensor, scales: Tensor, minima: Tensor | None, bits: int) -> int:
    """The group size of integers that fit together; raises ValueError for others."""
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if values.dtype != torch.int8 or values.dim() != 2 or scales.dim() != 2:
        raise ValueError("values must be int8 [N, K], scales [N, K / group]")
    rows, width = values.shape
    groups = scales.shape[1]
    if scales.shape[0] != rows or not groups or width % groups:
        raise ValueError(f"scales {list(scales.shape)} don't fit values {list(values.shape)}")
    if minima is not None and (bits != 4 or minima.shape != scales.shape):
        raise ValueError("minima are for 4 bits and have the shape of the scales")
    low, high = (-127, 127) if bits == 8 else (0, 15)
    if values.numel() and (int(values.min()) < low or int(values.max()) > high):
        raise ValueError(f"values of {bits} bits must lie in [{low}, {high}]")
    return group_size_for(f"int{bits}", width // groups)
