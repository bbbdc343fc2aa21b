"""Linear layers whose weights live in the library, packed for its kernels."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, Library, check
from kernels.cpu.threads import num_threads
from kernels.interface import LinearLayer
from kernels.quantization import check_integers, group_size_for

FORMATS = {"int8": 3, "int4": 4}
INT4_WITH_MINIMA = 5


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
        weakref.finalize(self, library.free_packed, handle)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `LinearLayer.__call__`."""
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
        status = self._linear(
            self.handle, out.data_ptr(), x.data_ptr(), stride, rows, DTYPES[x.dtype], num_threads()
        )
        if status:
            check(status)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """See `LinearLayer.rows`."""
        if ids.dim() != 1 or ids.dtype != torch.int64 or not ids.is_contiguous():
            raise ValueError("ids must be contiguous int64 [T]")
        out = torch.empty((len(ids), self.in_features))
        status = self._rows(self.handle, out.data_ptr(), ids.data_ptr(), len(ids), num_threads())
        if status:
            check(status)
        return out


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
    if width and weight.stride(1) != 1:
        weight = weight.contiguous()
    kept = _bias(bias, rows)
    source = (weight.data_ptr(), weight.stride(0), DTYPES[weight.dtype], rows, width, _at(kept))
    if quantization is None:
        handle = library.pack(*source, round_inputs, num_threads())
    else:
        group = group_size_for(quantization, group_size)
        handle = library.pack_quantized(*source, FORMATS[quantization], group, num_threads())
    return CpuLinear(library, handle, rows, width)


def integer_linear(
    library: Library,
    values: Tensor,
    scales: Tensor,
    minima: Tensor | None,
    bias: Tensor | None,
    bits: int,
) -> CpuLinear:
    """See `KernelSet.IntegerLinear`."""
    group = check_integers(values, scales, minima, bits)
    rows, width = values.shape
    kept = _bias(bias, rows)
    values, scales = values.contiguous(), scales.float().contiguous()
    minima = None if minima is None else minima.float().contiguous()
    kind = FORMATS[f"int{bits}"] if minima is None else INT4_WITH_MINIMA
    handle = library.pack_integers(
        values.data_ptr(), scales.data_ptr(), _at(minima), rows, width, _at(kept), kind, group,
        num_threads(),
    )  # fmt: skip
    return CpuLinear(library, handle, rows, width)


def _bias(bias: Tensor | None, rows: int) -> Tensor | None:
    """The bias in float32, as the library copies it."""
    if bias is None:
        return None
    if bias.shape != (rows,):
        raise ValueError(f"bias {list(bias.shape)} must be [{rows}]")
    return bias.float().contiguous()


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
