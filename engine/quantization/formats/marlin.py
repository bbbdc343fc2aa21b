"""Marlin: integers of a checkpoint in the order in which a GPU's tensor cores read them.

Dense (IST-DASLab, AutoGPTQ): `B` int32 [K / 16, 2 N] of 4 bits and `s` [groups, N]. With 2:4
sparsity, where two of four neighbors are stored: `B_24` int32 [K / 32, N * bits / 2], `B_meta`
int16 [K / 32, 2 N], which says which two, and `s`. There are no zero points. (Frantar et al.,
"MARLIN", 2024.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.quantization.formats.base import (
    CheckpointFormat,
    ConfigFields,
    LayerTensors,
    TensorSource,
    modules_with,
)
from engine.quantization.formats.matrices import WORD, GroupedMatrix, row_numbers, unpack_columns
from engine.quantization.packing import Rows, WeightSource

#: Inputs and outputs of a tile; four tiles of outputs share one order.
_TILE = 16
_SPAN = 4 * _TILE
#: By bits: index among a thread's values at each position in its words.
_INTERLEAVED = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}


class MarlinNames(NamedTuple):
    """Suffixes of a layer's tensors: integers, scales, and (2:4) positions of stored values."""

    words: str
    scales: str
    metadata: str | None = None


def marlin_matrix(
    parts: LayerTensors, names: MarlinNames, bits: int, group: int | None
) -> WeightSource:
    """A weight [N, K]; `group`: number of inputs that share a scale, None: the complete row."""
    depth, width = parts.shape(names.words, 2)
    rows = width * WORD // bits // _TILE
    if rows % _SPAN or width * WORD != rows * bits * _TILE:
        raise parts.error(names.words, f"has {width} words a row, which isn't whole tiles")
    columns = depth * _TILE * (1 if names.metadata is None else 2)
    group = columns if group is None else min(group, columns)
    groups = -(-columns // group)
    words = parts.read(names.words, (torch.int32,))
    scales = parts.scales(names.scales, (groups, rows))
    metadata = None
    if names.metadata is not None:
        shape = (columns // 32, 2 * rows)
        metadata = parts.read(names.metadata, (torch.int16,), shape).reshape(-1)
    order = _value_order(bits, sparse=metadata is not None)

    def values(selected: Rows) -> Tensor:
        numbers = row_numbers(selected, rows)
        if len(numbers) == 0:
            return torch.empty((0, columns), dtype=torch.uint8)
        first = int(numbers.min()) // _SPAN * _SPAN
        end = int(numbers.max()) // _SPAN * _SPAN + _SPAN
        tiles = words[:, first * width // rows : end * width // rows]
        integers = _in_rows(tiles, bits, order)[numbers - first]
        return integers if metadata is None else _spread(integers, metadata, numbers, rows, bits)

    return GroupedMatrix(
        f"marlin{'' if metadata is None else ' 2:4'} int{bits} g{group}",
        (rows, columns),
        group,
        bits,
        values,
        _ordered_scales(scales, sparse=metadata is not None).T,
        1 << (bits - 1),
    )


def _value_order(bits: int, *, sparse: bool) -> Tensor:
    """Return int64 [1024]: the position of each value in four tiles, each 16 inputs x 16 outputs.

    If sparse, the four tiles are one of 16 inputs x 64 outputs, viewed as [4, 16, 16].
    """
    lane = torch.arange(32)[:, None, None, None]
    part = torch.arange(4)[:, None, None]
    half = torch.arange(2)[:, None]
    inputs = 2 * (lane % 4) + torch.tensor((0, 1, 8, 9))
    if sparse:
        outputs = 256 * (lane // 8) + 8 * (lane // 4 % 2) + 4 * half + part
    else:
        outputs = 256 * part + lane // 4 + 8 * half
    indexes = _INTERLEAVED[bits]
    return (_TILE * inputs + outputs).reshape(-1, len(indexes))[:, list(indexes)].flatten()


def _in_rows(words: Tensor, bits: int, order: Tensor) -> Tensor:
    """Return uint8 [n, K] from words [K / 16, n * bits / 2]."""
    count = words.shape[1] * WORD // bits
    values = unpack_columns(words, bits, count).to(torch.uint8).unflatten(1, (-1, len(order)))
    tiles = torch.empty_like(values)
    tiles[..., order] = values
    return tiles.reshape(len(words), -1, _TILE, _TILE).transpose(1, 2).flatten(2).flatten(0, 1).T


def _spread(integers: Tensor, metadata: Tensor, numbers: Tensor, rows: int, bits: int) -> Tensor:
    """Return [n, K]: integers [n, K / 2] of some rows at their positions among zeros.

    Each word of `metadata` [rows * K / 16] is for 16 inputs, four bits for two of four, in
    CUTLASS's order for sparse products.
    """
    words_per_row = metadata.numel() // rows
    row = numbers[:, None]
    column = torch.arange(words_per_row)
    position = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row % 64 // 8 * 4
    swapped = (position + column) % 2
    position, column = position ^ swapped, column ^ swapped
    words = metadata[column // 2 * 2 * rows + position * 2 + column % 2].to(torch.int32)
    pairs = (words[..., None] >> torch.tensor((0, 2, 4, 6, 8, 10, 12, 14))) & 3
    of_four = pairs.flatten(1) + torch.arange(integers.shape[1]) // 2 * 4
    zero = 1 << (bits - 1)
    dense = torch.full((len(integers), 2 * integers.shape[1]), zero, dtype=torch.uint8)
    return dense.scatter_(1, of_four.long(), integers)


def _ordered_scales(scales: Tensor, *, sparse: bool) -> Tensor:
    """Return scales [groups, N] in the order of outputs."""
    if len(scales) == 1 and sparse:
        return scales
    if len(scales) == 1:
        order = (
            torch.tensor((0, 1, 8, 9, 16, 17, 24, 25)) + 2 * torch.arange(4)[:, None]
        ).flatten()
    elif sparse:
        order = (torch.tensor((0, 4, 1, 5, 2, 6, 3, 7)) + 8 * torch.arange(8)[:, None]).flatten()
    else:
        order = (8 * torch.arange(8) + torch.arange(8)[:, None]).flatten()
    return scales.unflatten(1, (-1, len(order)))[..., order.argsort()].flatten(1)


class Marlin(CheckpointFormat):
    """Dense integers of 4 bits."""

    name = "marlin"
    _names = MarlinNames("B", "s")
    _bits: tuple[int, ...] = (4,)

    def __init__(self, fields: ConfigFields) -> None:
        self._width = fields.integer("bits", 4, self._bits)
        size = fields.integer("group_size", -1, (-1, 128))
        self._group = None if size == -1 else size

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        return modules_with(tensors, self._names.words)

    def suffixes(self) -> Iterable[str]:
        return *(name for name in self._names if name is not None), "workspace"

    def matrix(self, parts: LayerTensors) -> WeightSource:
        return marlin_matrix(parts, self._names, self._width, self._group)


class Marlin24(Marlin):
    """2:4 sparse integers of 4 or 8 bits."""

    name = "gptq_marlin_24"
    _names = MarlinNames("B_24", "s", "B_meta")
    _bits = (4, 8)
