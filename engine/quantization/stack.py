"""From matrices of a checkpoint to one packed linear layer, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from engine.quantization.matrix import IntegerFormat, Matrix, Own, Rows, keeps
from engine.quantization.scratch import Scratch
from kernels import KernelSet, LinearLayer
from kernels.codes import Codes, Coding
from kernels.interface import PIECE_ROWS, Integers

#: Floats that are read at once: what a load needs beside the packed weights.
_PIECE_BYTES = 4 << 20
#: For matrices of several formats in one layer: 8 bits hold what any format of fewer says.
_MIXED_GROUP = 32


class Stack:
    """Matrices with as many columns, over each other, as the weight of one linear layer.

    Args:
        matrices: from top to bottom.
        order: int64 [N], the weight's rows as numbers of the stack's; None: as they come. Only for
            a single matrix.
        release: called after each piece that has been packed.
        scratch: to join and convert pieces in; default: one of its own.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        order: Tensor | None = None,
        release: Callable[[], None] = lambda: None,
        scratch: Scratch | None = None,
    ) -> None:
        self._matrices, self._order, self._release = list(matrices), order, release
        self._scratch = scratch or Scratch()
        self.shape = (sum(m.shape[0] for m in matrices), matrices[0].shape[1])

    def pack(
        self,
        ops: KernelSet,
        bias: Tensor | None,
        dtype: torch.dtype,
        quantization: str | None,
        round_inputs: bool = False,
    ) -> LinearLayer:
        """The layer.

        It is quantised where `quantization` ("int8", "int4") says so; else what the checkpoint has
        in few bits stays so, without being rounded again where the kernels have its format; and
        floats are kept in `dtype`. `round_inputs`: see `KernelSet.PackedLinear`.
        """
        own = self._own(ops, quantization)
        if isinstance(own, Coding):
            return self._pack_codes(ops, bias, own)
        only = own or self._integers(quantization)
        if only is not None:
            return self._pack_integers(ops, bias, only)
        if quantization is None and any(matrix.quantized for matrix in self._matrices):
            return self._pack_floats(ops, bias, dtype, "int8", _MIXED_GROUP, False)
        return self._pack_floats(ops, bias, dtype, quantization, None, round_inputs)

    def _own(self, ops: KernelSet, quantization: str | None) -> Own | None:
        """The form of their own that all matrices have and these kernels keep."""
        forms = {matrix.own for matrix in self._matrices}
        own = forms.pop() if quantization is None and len(forms) == 1 else None
        return own if own is not None and keeps(ops, own) else None

    def _integers(self, quantization: str | None) -> IntegerFormat | None:
        """The kernels' format in which all matrices stay as they are; None: there is none."""
        formats = {matrix.integers for matrix in self._matrices}
        return formats.pop() if quantization is None and len(formats) == 1 else None

    def keeps(self, ops: KernelSet, dtype: torch.dtype, quantization: str | None) -> bool:
        """Whether the kernels multiply by the checkpoint's own numbers."""
        kind = self._own(ops, quantization) or self._integers(quantization)
        if kind is not None:
            return all(matrix.stored_bits == kind.bits for matrix in self._matrices)
        plain = str(dtype).removeprefix("torch.")
        return quantization is None and all(each.source == plain for each in self._matrices)

    def _pack_floats(
        self,
        ops: KernelSet,
        bias: Tensor | None,
        dtype: torch.dtype,
        quantization: str | None,
        group_size: int | None,
        round_inputs: bool,
    ) -> LinearLayer:
        return ops.StreamedLinear(
            self.shape,
            self._float_pieces(None if quantization else dtype),
            bias,
            dtype=dtype,
            quantization=quantization,
            group_size=group_size,
            round_inputs=round_inputs,
        )

    def _pack_integers(
        self, ops: KernelSet, bias: Tensor | None, kind: IntegerFormat
    ) -> LinearLayer:
        return ops.StreamedIntegerLinear(
            self.shape,
            self._integer_pieces(kind),
            bias,
            bits=kind.bits,
            group_size=kind.group_size,
            with_minima=kind.with_minima,
            with_zeros=kind.with_zeros,
            order=_order_of(kind),
        )

    def _pack_codes(self, ops: KernelSet, bias: Tensor | None, coding: Coding) -> LinearLayer:
        return ops.StreamedCodedLinear(self.shape, self._code_pieces(), bias, coding=coding)

    def _float_pieces(self, dtype: torch.dtype | None) -> Iterator[Tensor]:
        """The stack's rows, in `dtype` or as they are; each piece valid until the next."""
        for parts in self._pieces():
            pieces = [matrix.floats(rows) for matrix, rows in parts]
            yield self._scratch.joined(pieces, dtype)
            del pieces
            self._release()

    def _code_pieces(self) -> Iterator[Codes]:
        for parts in self._pieces():
            pieces = [cast(Codes, matrix.as_own(rows)) for matrix, rows in parts]
            codes, scales = zip(*((piece.codes, piece.scales) for piece in pieces), strict=True)
            yield Codes(torch.cat(codes), torch.cat(scales)) if len(pieces) > 1 else pieces[0]
            del pieces, codes, scales
            self._release()

    def _integer_pieces(self, kind: IntegerFormat) -> Iterator[Integers]:
        for parts in self._pieces():
            pieces = [
                cast(Integers, matrix.as_own(rows))
                if kind == matrix.own
                else matrix.as_integers(rows)
                for matrix, rows in parts
            ]
            yield pieces[0] if len(pieces) == 1 else _joined(pieces)
            del pieces
            self._release()

    def _pieces(self) -> Iterator[list[tuple[Matrix, Rows]]]:
        """What makes up each piece: rows of one matrix, or of two and more where they meet."""
        total, widest = self.shape[0], max(matrix.row_bytes for matrix in self._matrices)
        step = max(1, _PIECE_BYTES // max(1, widest * PIECE_ROWS)) * PIECE_ROWS
        for start in range(0, total, step):
            stop = min(total, start + step)
            if self._order is not None:
                yield [(self._matrices[0], self._order[start:stop])]
            else:
                yield list(self._between(start, stop))

    def _between(self, start: int, stop: int) -> Iterator[tuple[Matrix, Rows]]:
        above = 0
        for matrix in self._matrices:
            low, high = max(start, above), min(stop, above + matrix.shape[0])
            if low < high:
                yield matrix, slice(low - above, high - above)
            above += matrix.shape[0]


def _order_of(kind: IntegerFormat) -> Tensor | None:
    return torch.frombuffer(bytearray(kind.order), dtype=torch.int64) if kind.order else None


def _joined(pieces: list[Integers]) -> Integers:
    minima = [piece.minima for piece in pieces if piece.minima is not None]
    zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
    return Integers(
        torch.cat([piece.values for piece in pieces]),
        torch.cat([piece.scales for piece in pieces]),
        torch.cat(minima) if minima else None,
        torch.cat(zeros) if zeros else None,
    )
