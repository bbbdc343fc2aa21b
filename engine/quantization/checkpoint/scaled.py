"""Weights in floats of 8 bits with scales: for all of a weight, a row, or a block of both."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quantization.checkpoint.bits import row_numbers
from engine.quantization.matrix import IntegerFormat, Rows
from kernels.interface import Integers


class ScaledMatrix:
    """weight[r, k] = value[r, k] * scale[r // block rows, k // block columns].

    Args:
        source: of which format it is, for the load report.
        values: float8 or int8 [N, K].
        scales: [ceil(N / block rows), ceil(K / block columns)], finite.
        block: (rows, columns) that share a scale.
    """

    quantized = False
    stored_bits = 8
    integers: IntegerFormat | None = None

    def __init__(self, source: str, values: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
        self.source, self.shape = source, (values.shape[0], values.shape[1])
        self.row_bytes = values.shape[1] * 12
        self._values, self._scales, self._block = values, scales, block

    def floats(self, rows: Rows) -> Tensor:
        """See `Matrix`: float32, not rounded."""
        numbers = row_numbers(rows, self.shape[0])
        scales = self._scales.float()[numbers // self._block[0]]
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self._block[1], 1)[:, : self.shape[1]]
        return _taken(self._values, rows).to(torch.float32).mul_(scales)

    def as_integers(self, rows: Rows) -> Integers:
        """See `Matrix`."""
        raise ValueError("floats of 8 bits have no integers")


def _taken(values: Tensor, rows: Rows) -> Tensor:
    """Those rows; of 8-bit floats torch takes slices alone."""
    if isinstance(rows, slice):
        return values[rows]
    return values.view(torch.uint8)[rows].view(values.dtype)
