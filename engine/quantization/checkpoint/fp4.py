"""e2m1: floats of four bits, two in a byte, with a scale for 16 or 32 neighbours of a row.

Twice such a float is a whole number from -12 to 12, so that integers of 8 bits hold it
exactly where no kernel has these floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quantization.checkpoint.bits import nibbles
from engine.quantization.checkpoint.grouped import GroupedMatrix
from engine.quantization.matrix import Matrix, Rows

_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def e2m1_matrix(
    source: str, packed: Tensor, scales: Tensor, group: int, factor: float = 1.0
) -> Matrix:
    """weight = e2m1 * scale * factor, of packed uint8 [N, K / 2] and scales [N, K / group]."""

    def values(at: Rows) -> Tensor:
        return _DOUBLED[nibbles(packed[at]).long()]

    rows, half = packed.shape
    return GroupedMatrix(
        source, (rows, 2 * half), group, 8, values, scales, factor=factor / 2.0, stored_bits=4,
        codes=lambda at: nibbles(packed[at]),
    )  # fmt: skip
