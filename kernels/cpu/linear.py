"""Linear layers whose weights are packed for the library's kernels and owned by it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, Library, address, check
from kernels.cpu.memory import num_threads
from kernels.interface import IntegerRows, LinearLayer, RankGroup
from kernels.linear_factory import (
    CodeFormat,
    CodeKind,
    CodeRows,
    FloatFormat,
    IntegerFormat,
    RowSlice,
    WeightFormat,
    check_codes,
    check_coding,
    check_row_slice,
    group_size_for,
)

FORMATS = {"int8": 3, "int4": 4}
INT4_WITH_MINIMA = 5
WITH_ZEROS = {4: 6, 8: 10}
CODINGS: dict[CodeKind, int] = {"e2m1": 7, "table": 8, "e4m3": 9}
PackSlice = Callable[[int, Any], int]
"""Packs a slice of rows, given the index of its first row; returns a status."""


class CpuLinear(LinearLayer):
    """A packed weight, freed with this object.

    Attributes:
        ranks: the ranks that share it; None if it isn't shared.
    """

    ranks: RankGroup | None = None

    def __init__(self, library: Library, handle: int | None, out_features: int, k: int) -> None:
        """Takes ownership of `handle`; raises MemoryError if it is None."""
        if not handle:
            raise MemoryError(f"no memory for packed weights [{out_features}, {k}]")
        self.handle = handle
        self.out_features, self.in_features = out_features, k
        self._row_size = k
        self.nbytes = library.packed_bytes(handle)
        self._linear, self._rows = library.linear, library.linear_rows
        # Not at exit, when another thread may still be computing a product.
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

    @property
    def row_size(self) -> int:
        return self._row_size

    def rows(self, ids: Tensor) -> Tensor:
        if ids.dim() != 1 or ids.dtype != torch.int64 or not ids.is_contiguous():
            raise ValueError("ids must be contiguous int64 [T]")
        out = torch.empty((len(ids), self._row_size))
        status = self._rows(self.handle, out.data_ptr(), ids.data_ptr(), len(ids), num_threads())
        if status:
            check(status)
        return out


def make_linear(
    library: Library,
    shape: tuple[int, int],
    slices: Iterable[RowSlice],
    form: WeightFormat,
    bias: Tensor | None,
) -> CpuLinear:
    """See `LinearFactory.make_linear`. Raises MemoryError if there is no room for the weight."""
    if isinstance(form, FloatFormat):
        layer, pack = _float_layer(library, shape, form, bias)
    elif isinstance(form, IntegerFormat):
        layer, pack = _integer_layer(library, shape, form, bias)
    else:
        layer, pack = _coded_layer(library, shape, form, bias)
    first, rows = 0, shape[0]
    for part in slices:
        count = len(_values(part))
        if first + count > rows:
            raise ValueError(f"the pieces have more than the weight's {rows} rows")
        if status := pack(first, part):
            check(status)
        first += count
    if first != rows:
        raise ValueError(f"the pieces have {first} rows, the weight {rows}")
    return layer


def _values(part: RowSlice) -> Tensor:
    if isinstance(part, IntegerRows):
        return part.values
    return part.codes if isinstance(part, CodeRows) else part


def _float_layer(
    library: Library, shape: tuple[int, int], form: FloatFormat, bias: Tensor | None
) -> tuple[CpuLinear, PackSlice]:
    kind, group, pack_rows = DTYPES[form.dtype], 0, library.pack_rows
    if form.quantization is not None:
        group = group_size_for(form.quantization, form.group_size)
        kind = FORMATS[form.quantization]
        pack_rows = library.pack_quantized_rows
    layer = _new_layer(library, shape, bias, kind, group, form.round_inputs)

    def pack(first: int, part: Tensor) -> int:
        if form.quantization is None:
            part = part.to(form.dtype)
        check_row_slice(part, shape)
        if part.stride(1) != 1 and part.shape[1] > 1:
            part = part.contiguous()
        return pack_rows(
            layer.handle, first, part.shape[0], part.data_ptr(), part.stride(0),
            DTYPES[part.dtype], num_threads(),
        )  # fmt: skip

    return layer, pack


def _integer_layer(
    library: Library, shape: tuple[int, int], form: IntegerFormat, bias: Tensor | None
) -> tuple[CpuLinear, PackSlice]:
    order = form.column_order(shape[1])
    form.check(shape[1])
    kind = INT4_WITH_MINIMA if form.with_minima else FORMATS[f"int{form.bits}"]
    kind = WITH_ZEROS[form.bits] if form.with_zeros else kind
    layer = _new_layer(library, shape, bias, kind, form.group_size, order=order)

    def pack(first: int, part: IntegerRows) -> int:
        form.check_rows(part, shape[1])
        values, scales = part.values.contiguous(), part.scales.float().contiguous()
        second = None if part.second is None else part.second.float().contiguous()
        return library.pack_integer_rows(
            layer.handle, first, len(values), values.data_ptr(), scales.data_ptr(), address(second),
            num_threads(),
        )  # fmt: skip

    return layer, pack


def _coded_layer(
    library: Library, shape: tuple[int, int], form: CodeFormat, bias: Tensor | None
) -> tuple[CpuLinear, PackSlice]:
    check_coding(form)
    if form.bits == 4 and shape[1] % form.group_size:
        raise ValueError(f"rows of {shape[1]} values have no whole groups of {form.group_size}")
    table = torch.tensor(form.table, dtype=torch.float32) if form.table else None
    layer = _new_layer(library, shape, bias, CODINGS[form.kind], form.group_size, table=table)

    def pack(first: int, part: CodeRows) -> int:
        check_codes(part, shape[1], form)
        codes, scales = part.codes.contiguous(), part.scales.float().contiguous()
        if form.kind == "e2m1":
            scales = scales * 0.5  # the kernel's integers are twice the floats
        where = layer.handle, first, len(codes), codes.data_ptr(), scales.data_ptr()
        if form.kind == "e4m3":
            return library.pack_float8_rows(*where, num_threads())
        return library.pack_integer_rows(*where, None, num_threads())

    return layer, pack


def _new_layer(
    library: Library,
    shape: tuple[int, int],
    bias: Tensor | None,
    kind: int,
    group: int,
    round_inputs: bool = False,
    table: Tensor | None = None,
    order: Tensor | None = None,
) -> CpuLinear:
    """Return a layer whose weights have yet to be packed."""
    float_bias = _bias(bias, shape[0])
    numbers = None if order is None else order.to(torch.int32).contiguous()
    handle = library.pack_new(
        kind, *shape, group, address(float_bias), round_inputs, address(table), address(numbers)
    )
    return CpuLinear(library, handle, *shape)


def _bias(bias: Tensor | None, rows: int) -> Tensor | None:
    """Return the bias in float32, from which the library copies it."""
    if bias is None:
        return None
    if bias.shape != (rows,):
        raise ValueError(f"bias {list(bias.shape)} must be [{rows}]")
    return bias.float().contiguous()
