"""What the implementations of quantised linear layers agree on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.layers import Integers

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


def group_of(values: Tensor, scales: Tensor) -> int:
    """The group size that whole values and scales have; raises ValueError where there is none."""
    if values.dim() != 2 or scales.dim() != 2:
        raise ValueError("values must be int8 [N, K], scales [N, K / group]")
    width, groups = values.shape[1], scales.shape[1]
    if not groups or width % groups:
        raise ValueError(f"scales {list(scales.shape)} don't fit values {list(values.shape)}")
    return width // groups


def check_integer_groups(
    shape: tuple[int, int], bits: int, group_size: int, with_minima: bool
) -> None:
    """Raise ValueError for integers that no kernel has."""
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if with_minima and bits != 4:
        raise ValueError("minima are for 4 bits")
    if shape[1] % group_size_for(f"int{bits}", group_size):
        raise ValueError(f"rows of {shape[1]} values have no whole groups of {group_size}")


def check_integers(
    piece: Integers,
    width: int,
    bits: int,
    group_size: int,
    with_minima: bool,
    with_zeros: bool = False,
) -> None:
    """Raise ValueError unless a piece's tensors fit each other and their layer."""
    values, scales, second = piece.values, piece.scales, piece.second
    if values.dtype != torch.int8 or values.dim() != 2 or values.shape[1] != width:
        raise ValueError(f"values must be int8 [N, {width}]")
    if scales.shape != (len(values), width // group_size):
        raise ValueError(f"scales {list(scales.shape)} don't fit values {list(values.shape)}")
    there = piece.minima is not None, piece.zeros is not None
    if there != (with_minima, with_zeros) or (second is not None and second.shape != scales.shape):
        raise ValueError(
            "minima or zero points are for layers that have them, and have the shape of the scales"
        )
    low, high = (-128, 127) if bits == 8 else (0, 15)
    if values.numel() and (int(values.min()) < low or int(values.max()) > high):
        raise ValueError(f"values of {bits} bits must lie in [{low}, {high}]")


def check_whole(
    values: Tensor,
    scales: Tensor,
    minima: Tensor | None,
    bits: int,
    zeros: Tensor | None = None,
) -> tuple[int, int]:
    """The shape of an integer weight; raises ValueError unless its parts fit each other."""
    group, shape = group_of(values, scales), (values.shape[0], values.shape[1])
    with_minima, with_zeros = minima is not None, zeros is not None
    check_integer_groups(shape, bits, group, with_minima)
    whole = Integers(values, scales, minima, zeros)
    check_integers(whole, shape[1], bits, group, with_minima, with_zeros)
    return shape


def check_piece(piece: Tensor, shape: tuple[int, int]) -> None:
    """Raise ValueError unless a piece could belong to the weight of `shape`."""
    if piece.dim() != 2 or piece.shape[1] != shape[1]:
        raise ValueError(f"a piece {list(piece.shape)} doesn't fit the weight {list(shape)}")


def stacked(shape: tuple[int, int], pieces: Iterable[Tensor]) -> Tensor:
    """The weight that pieces make up; raises ValueError unless it has `shape`."""
    weight, rows = torch.empty((0, shape[1])), 0
    for piece in pieces:
        check_piece(piece, shape)
        if not rows:
            weight = torch.empty(shape, dtype=piece.dtype, device=piece.device)
        if rows + len(piece) <= shape[0]:
            weight[rows : rows + len(piece)] = piece
        rows += len(piece)
    if rows != shape[0]:
        raise ValueError(f"the pieces have {rows} rows, the weight {shape[0]}")
    return weight
