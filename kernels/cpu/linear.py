"""Linear layers whose weights live in the library, packed for its kernels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, Library, address, check
from kernels.cpu.memory import num_threads
from kernels.interface import IntegerRows, LinearLayer
from kernels.linear_factory import (
    CodeFormat,
    CodeKind,
    CodeRows,
    check_codes,
    check_coding,
    check_integer_groups,
    check_integers,
    check_order,
    check_piece,
    group_of,
    group_size_for,
)

FORMATS = {"int8": 3, "int4": 4}
INT4_WITH_MINIMA = 5
WITH_ZEROS = {4: 6, 8: 10}
CODINGS: dict[CodeKind, int] = {"e2m1": 7, "table": 8, "e4m3": 9}
Piece = TypeVar("Piece")


class CpuLinear(LinearLayer):
    """One packed weight. The memory is given back when the object goes."""

    def __init__(self, library: Library, handle: int | None, out_features: int, k: int) -> None:
        """Takes over `handle`; raises MemoryError when it is None."""
        if not handle:
            raise MemoryError(f"no memory for packed weights [{out_features}, {k}]")
        self.handle = handle
        self.out_features, self.in_features = out_features, k
        self.nbytes = library.packed_bytes(handle)
        self._linear, self._rows = library.linear, library.linear_rows
        # Not at exit: a thread of a process that ends may be in the middle of a product.
        weakref.finalize(self, library.free_packed, handle).atexit = False

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows, width = x.shape
        stride, dense = x.stride()
        if width != self.in_features or (dense != 1 and width > 1):
            raise ValueError(f"x {list(x.shape)} must be dense rows of {self.in_features}")
        if out is None:
            out = torch.empty((rows, self.out_features), dtype=x.dtype)
        elif out.shape != (rows, self.out_features) or out.dtype != x.dtype:
            raise ValueError(f"out {list(out.shape)} must be [{rows}, {self.out_features}] as x")
        elif not out.is_contiguous():
            raise ValueError("out must be contiguous")
        kind = DTYPES.get(x.dtype)
        if kind is None:
            raise ValueError(f"x must be float32, bfloat16 or float16, not {x.dtype}")
        status = self._linear(
            self.handle, out.data_ptr(), x.data_ptr(), stride, rows, kind, num_threads()
        )
        if status:
            check(status)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        if ids.dim() != 1 or ids.dtype != torch.int64 or not ids.is_contiguous():
            raise ValueError("ids must be contiguous int64 [T]")
        out = torch.empty((len(ids), self.in_features))
        status = self._rows(self.handle, out.data_ptr(), ids.data_ptr(), len(ids), num_threads())
        if status:
            check(status)
        return out


def streamed_linear(
    library: Library,
    shape: tuple[int, int],
    pieces: Iterable[Tensor],
    bias: Tensor | None,
    dtype: torch.dtype,
    quantization: str | None,
    group_size: int | None,
    round_inputs: bool,
) -> CpuLinear:
    """See `KernelSet.StreamedLinear`."""
    kind, group, pack = DTYPES[dtype], 0, library.pack_rows
    if quantization is not None:
        group = group_size_for(quantization, group_size)
        kind = FORMATS[quantization]
        pack = library.pack_quantized_rows
    layer = _room(library, shape, bias, kind, group, round_inputs)

    def put(first: int, piece: Tensor) -> None:
        if quantization is None:
            piece = piece.to(dtype)
        check_piece(piece, shape)
        if piece.stride(1) != 1 and piece.shape[1] > 1:
            piece = piece.contiguous()
        status = pack(
            layer.handle, first, piece.shape[0], piece.data_ptr(), piece.stride(0),
            DTYPES[piece.dtype], num_threads(),
        )  # fmt: skip
        if status:
            check(status)

    _fill(shape[0], pieces, put, len)
    return layer


def streamed_integer_linear(
    library: Library,
    shape: tuple[int, int],
    pieces: Iterable[IntegerRows],
    bias: Tensor | None,
    bits: int,
    group_size: int,
    with_minima: bool,
    with_zeros: bool = False,
    order: Tensor | None = None,
) -> CpuLinear:
    """See `KernelSet.StreamedIntegerLinear`."""
    check_order(order, shape[1])
    check_integer_groups(shape, bits, group_size, with_minima)
    kind = INT4_WITH_MINIMA if with_minima else FORMATS[f"int{bits}"]
    kind = WITH_ZEROS[bits] if with_zeros else kind
    layer = _room(library, shape, bias, kind, group_size, False, order=order)

    def put(first: int, piece: IntegerRows) -> None:
        check_integers(piece, shape[1], bits, group_size, with_minima, with_zeros)
        values, scales = piece.values.contiguous(), piece.scales.float().contiguous()
        second = None if piece.second is None else piece.second.float().contiguous()
        status = library.pack_integer_rows(
            layer.handle, first, len(values), values.data_ptr(), scales.data_ptr(), address(second),
            num_threads(),
        )  # fmt: skip
        if status:
            check(status)

    _fill(shape[0], pieces, put, lambda piece: len(piece.values))
    return layer


def streamed_coded_linear(
    library: Library,
    shape: tuple[int, int],
    pieces: Iterable[CodeRows],
    bias: Tensor | None,
    coding: CodeFormat,
) -> CpuLinear:
    """See `KernelSet.StreamedCodedLinear`."""
    check_coding(coding)
    if coding.bits == 4 and shape[1] % coding.group_size:
        raise ValueError(f"rows of {shape[1]} values have no whole groups of {coding.group_size}")
    table = torch.tensor(coding.table, dtype=torch.float32) if coding.table else None
    kind = CODINGS[coding.kind]
    layer = _room(library, shape, bias, kind, coding.group_size, False, table=table)

    def put(first: int, piece: CodeRows) -> None:
        check_codes(piece, shape[1], coding)
        codes, scales = piece.codes.contiguous(), piece.scales.float().contiguous()
        if coding.kind == "e2m1":
            scales = scales * 0.5  # the kernel's integers are twice the floats
        at, by = codes.data_ptr(), scales.data_ptr()
        if coding.kind == "e4m3":
            status = library.pack_float8_rows(
                layer.handle, first, len(codes), at, by, num_threads()
            )
        else:
            status = library.pack_integer_rows(
                layer.handle, first, len(codes), at, by, None, num_threads()
            )
        if status:
            check(status)

    _fill(shape[0], pieces, put, lambda piece: len(piece.codes))
    return layer


def packed_linear(
    library: Library,
    weight: Tensor,
    bias: Tensor | None,
    quantization: str | None,
    group_size: int | None,
    round_inputs: bool,
) -> CpuLinear:
    """See `KernelSet.PackedLinear`."""
    rows, width = weight.shape
    return streamed_linear(
        library, (rows, width), [weight], bias, weight.dtype, quantization, group_size, round_inputs
    )


def integer_linear(
    library: Library, whole: IntegerRows, bias: Tensor | None, bits: int
) -> CpuLinear:
    """See `KernelSet.IntegerLinear`."""
    group, (rows, width) = group_of(whole.values, whole.scales), whole.values.shape
    with_minima, with_zeros = whole.minima is not None, whole.zeros is not None
    return streamed_integer_linear(
        library, (rows, width), [whole], bias, bits, group, with_minima, with_zeros
    )


def _room(
    library: Library,
    shape: tuple[int, int],
    bias: Tensor | None,
    kind: int,
    group: int,
    round_inputs: bool,
    table: Tensor | None = None,
    order: Tensor | None = None,
) -> CpuLinear:
    """A layer whose weights are still to come."""
    kept = _bias(bias, shape[0])
    numbers = None if order is None else order.to(torch.int32).contiguous()
    handle = library.pack_new(
        kind, *shape, group, address(kept), round_inputs, address(table), address(numbers)
    )
    return CpuLinear(library, handle, *shape)


def _fill(
    rows: int,
    pieces: Iterable[Piece],
    put: Callable[[int, Piece], None],
    size: Callable[[Piece], int],
) -> None:
    """Put each piece behind the one before. Raises ValueError unless they make up all rows."""
    first = 0
    for piece in pieces:
        if first + size(piece) > rows:
            raise ValueError(f"the pieces have more than the weight's {rows} rows")
        put(first, piece)
        first += size(piece)
    if first != rows:
        raise ValueError(f"the pieces have {first} rows, the weight {rows}")


def _bias(bias: Tensor | None, rows: int) -> Tensor | None:
    """The bias in float32, as the library copies it."""
    if bias is None:
        return None
    if bias.shape != (rows,):
        raise ValueError(f"bias {list(bias.shape)} must be [{rows}]")
    return bias.float().contiguous()
