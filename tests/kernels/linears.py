"""Linear layers of weights in few bits, as tests have them: whole, or cut into slices of rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.interface import IntegerRows, KernelSet, LinearLayer
from kernels.linear_factory import FloatFormat, IntegerFormat


def integer_linear(
    kernels: KernelSet,
    values: Tensor,
    scales: Tensor,
    minima: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int,
    zeros: Tensor | None = None,
) -> LinearLayer:
    """Of a whole weight of integers."""
    rows, width = values.shape
    form = IntegerFormat(bits, width // scales.shape[1], minima is not None, zeros is not None)
    full_integer_rows = IntegerRows(values, scales, minima, zeros)
    return kernels.make_linear((rows, width), [full_integer_rows], form, bias)


def sliced_integers(
    kernels: KernelSet,
    shape: tuple[int, int],
    slices: Iterable[IntegerRows],
    *,
    order: Tensor | None = None,
    **form: int,
) -> LinearLayer:
    """`form`: the fields of `IntegerFormat`."""
    ids = b"" if order is None else order.numpy().tobytes()
    return kernels.make_linear(shape, slices, IntegerFormat(**form, order=ids))


def sliced_floats(
    kernels: KernelSet,
    shape: tuple[int, int],
    slices: Iterable[Tensor],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    quantization: str | None = None,
) -> LinearLayer:
    """Of floats that are kept or rounded."""
    return kernels.make_linear(shape, slices, FloatFormat(dtype, quantization), bias)
