"""Weights as they lie in a checkpoint, read some rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.codes import Codes, Coding
from kernels.interface import Integers, KernelSet

Rows = slice | Tensor
"""Which rows: a slice, or their numbers int64 [n]."""


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """A format of `KernelSet.StreamedIntegerLinear`; `order`: of the inputs, int64 in bytes."""

    bits: int
    group_size: int
    with_minima: bool = False
    with_zeros: bool = False
    order: bytes = b""


Own = IntegerFormat | Coding
"""A form that only some sets of kernels keep: sorted inputs, bytes with zero points, codes."""


def keeps(ops: KernelSet, own: Own) -> bool:
    """Whether these kernels keep weights of such a form."""
    if isinstance(own, Coding):
        return ops.keeps_codes(own)
    bytes_with_zeros = own.bits == 8 and own.with_zeros
    return (ops.sorts_inputs or not own.order) and (ops.byte_zeros or not bytes_with_zeros)


class Matrix(Protocol):
    """A weight [N, K] of a checkpoint.

    Attributes:
        shape: (N, K).
        row_bytes: what a row takes while it's read.
        source: of which format it is, for the load report.
        stored_bits: of a value in the checkpoint, without scales.
        quantized: it is kept in few bits, and 8 hold it where no kernel has its own format.
        integers: the kernels' format that takes it as it is; None: none does.
        own: its own form, that some kernels keep; goes before `integers` there. None: it has none.
    """

    shape: tuple[int, int]
    row_bytes: int
    source: str
    stored_bits: int
    quantized: bool
    integers: IntegerFormat | None
    own: Own | None

    def floats(self, rows: Rows) -> Tensor:
        """Those rows, [n, K] in a float dtype; maybe backed by the mapped file."""

    def as_integers(self, rows: Rows) -> Integers:
        """Those rows as `integers` says. Raises ValueError where it is None."""

    def as_own(self, rows: Rows) -> Integers | Codes:
        """Those rows as `own` says. Raises ValueError where it is None."""


def stays_small(ops: KernelSet, matrix: Matrix) -> bool:
    """Whether these kernels keep it in few bits as it is, and meet x in its own order."""
    own = matrix.own if matrix.own is not None and keeps(ops, matrix.own) else None
    kind = own or matrix.integers
    return kind is not None and not (isinstance(kind, IntegerFormat) and kind.order)


class Plain:
    """Of a `Matrix` that no kernel takes as it is."""

    integers: IntegerFormat | None = None
    own: Own | None = None

    def as_integers(self, rows: Rows) -> Integers:
        """See `Matrix`."""
        raise ValueError(f"{type(self).__name__} has no integers of the kernels")

    def as_own(self, rows: Rows) -> Integers | Codes:
        """See `Matrix`."""
        raise ValueError(f"{type(self).__name__} has no form of the kernels")


class DenseMatrix(Plain):
    """A tensor."""

    quantized: bool = False

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.source = str(tensor.dtype).removeprefix("torch.")
        self.stored_bits = 8 * tensor.element_size()
        self.shape = (tensor.shape[0], tensor.shape[1])
        self.row_bytes = tensor.shape[1] * tensor.element_size()

    def floats(self, rows: Rows) -> Tensor:
        """See `Matrix`."""
        return self.tensor[rows]
