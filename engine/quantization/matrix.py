"""Weights as they lie in a checkpoint, read some rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.interface import Integers

Rows = slice | Tensor
"""Which rows: a slice, or their numbers int64 [n]."""


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """A format of `KernelSet.StreamedIntegerLinear`."""

    bits: int
    group_size: int
    with_minima: bool = False
    with_zeros: bool = False


class Matrix(Protocol):
    """A weight [N, K] of a checkpoint.

    Attributes:
        shape: (N, K).
        row_bytes: what a row takes while it's read.
        source: of which format it is, for the load report.
        stored_bits: of a value in the checkpoint, without scales.
        quantized: it is kept in few bits, and 8 hold it where no kernel has its own format.
        integers: the kernels' format that takes it as it is; None: none does.
    """

    shape: tuple[int, int]
    row_bytes: int
    source: str
    stored_bits: int
    quantized: bool
    integers: IntegerFormat | None

    def floats(self, rows: Rows) -> Tensor:
        """Those rows, [n, K] in a float dtype; maybe backed by the mapped file."""

    def as_integers(self, rows: Rows) -> Integers:
        """Those rows as `integers` says. Raises ValueError where it is None."""


class DenseMatrix:
    """A tensor."""

    quantized: bool = False
    integers: IntegerFormat | None = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.source = str(tensor.dtype).removeprefix("torch.")
        self.stored_bits = 8 * tensor.element_size()
        self.shape = (tensor.shape[0], tensor.shape[1])
        self.row_bytes = tensor.shape[1] * tensor.element_size()

    def floats(self, rows: Rows) -> Tensor:
        """See `Matrix`."""
        return self.tensor[rows]

    def as_integers(self, rows: Rows) -> Integers:
        """See `Matrix`."""
        raise ValueError("a tensor of floats has no integers")
