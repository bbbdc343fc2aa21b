"""Weights in floats of 8 bits with scales: for all of a weight, a row, or a block of both."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quantization.checkpoint.bits import row_numbers
from engine.quantization.matrix import Plain, Rows
from kernels.codes import Codes, Coding
from kernels.quantization import MOST


class ScaledMatrix(Plain):
    """weight[r, k] = value[r, k] * scale[r // block rows, k // block columns].

    Args:
        source: of which format it is, for the load report.
        values: float8 or int8 [N, K].
        scales: [ceil(N / block rows), ceil(K / block columns)], finite.
        block: (rows, columns) that share a scale.
    """

    quantized = False
    stored_bits = 8

    def __init__(self, source: str, values: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
        self.source, self.shape = source, (values.shape[0], values.shape[1])
        self.row_bytes = values.shape[1] * 12
        self._values, self._scales, self._block = values, scales, block
        group = code_group(block[1], values.shape[1])
        if values.dtype == torch.float8_e4m3fn and group is not None:
            self.own = Coding("e4m3", group)

    def floats(self, rows: Rows) -> Tensor:
        """See `Matrix`: float32, not rounded."""
        scales = self._scales_of(rows)
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self._block[1], 1)[:, : self.shape[1]]
        return _taken(self._values, rows).to(torch.float32).mul_(scales)

    def _scales_of(self, rows: Rows) -> Tensor:
        return self._scales.float()[row_numbers(rows, self.shape[0]) // self._block[0]]

    def as_own(self, rows: Rows) -> Codes:
        """See `Matrix`."""
        if not isinstance(self.own, Coding):
            raise ValueError(f"{self.source} has no form of the kernels")
        codes = _taken(self._values, rows).view(torch.uint8)
        return Codes(
            codes, by_group(self._scales_of(rows), self._block[1], self.own, self.shape[1])
        )


def code_group(block: int, width: int) -> int | None:
    """The group size in which kernels keep codes whose scales are for `block` neighbours.

    A row's or a weight's only scale is kept as often as it takes. None: there is none.
    """
    if block >= width:
        return min(MOST, -(-width // 16) * 16)
    return next((size for size in range(MOST, 0, -16) if block % size == 0), None)


def by_group(scales: Tensor, block: int, coding: Coding, width: int) -> Tensor:
    """Scales of blocks of columns [n, blocks] as those of the kernels' groups."""
    groups = -(-width // coding.group_size)
    if scales.shape[1] == 1:
        return scales.expand(len(scales), groups)
    return scales.repeat_interleave(block // coding.group_size, 1)[:, :groups]


def _taken(values: Tensor, rows: Rows) -> Tensor:
    """Those rows; of 8-bit floats torch takes slices alone."""
    if isinstance(rows, slice):
        return values[rows]
    return values.view(torch.uint8)[rows].view(values.dtype)
