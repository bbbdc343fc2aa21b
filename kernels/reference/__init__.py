"""Plain torch versions of the kernels: the oracle of the tests, and the fallback.

They compute in float32 (in float64 for float64 inputs, as a reference for themselves), on any
device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from kernels.cpu.memory import lazy_zeros
from kernels.interface import IntegerRows, KernelSet
from kernels.linear_factory import (
    CodeFormat,
    CodeRows,
    FloatFormat,
    RowSlice,
    WeightFormat,
    concatenate_rows,
    join_dequantized,
    join_integers,
)
from kernels.reference import attention, elementwise, sampling
from kernels.reference.linear import ReferenceLinear, dequantize


class ReferenceKernels(KernelSet):
    """A `KernelSet` of this package's functions."""

    name = "reference"

    def __init__(self, why: str = "asked for", device: torch.device | str = "cpu") -> None:
        self.why = why
        self.device = torch.device(device)
        self.has_own_attention = self.device.type == "cpu"

    def new_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "cpu":
            return lazy_zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def PackedLinear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
    ) -> ReferenceLinear:
        """Like `KernelSet.PackedLinear`, but moves the weight to this set's device."""
        added = None if bias is None else bias.to(self.device)
        return ReferenceLinear(weight.to(self.device), added, **options)

    def make_linear(
        self,
        shape: tuple[int, int],
        slices: Iterable[RowSlice],
        form: WeightFormat,
        bias: torch.Tensor | None = None,
    ) -> ReferenceLinear:
        if isinstance(form, FloatFormat):
            weight = concatenate_rows(shape, cast(Iterable[torch.Tensor], slices)).to(form.dtype)
            return self.PackedLinear(
                weight, bias, quantization=form.quantization, group_size=form.group_size
            )
        if isinstance(form, CodeFormat):
            weight = join_dequantized(shape, cast(Iterable[CodeRows], slices), form)
            return self.PackedLinear(weight, bias)
        if form.order:
            raise ValueError("these kernels have no order of inputs")
        rows = join_integers(shape, cast(Iterable[IntegerRows], slices), form)
        weight = dequantize(rows.values, rows.scales, rows.minima, form.bits, rows.zeros)
        return self.PackedLinear(weight, bias)

    rms_norm = staticmethod(elementwise.rms_norm)
    fused_add_rms_norm = staticmethod(elementwise.fused_add_rms_norm)
    rope_and_cache = staticmethod(elementwise.rope_and_cache)
    paged_attention = staticmethod(attention.paged_attention)
    mla_attention = staticmethod(attention.latent_attention)
    silu_and_mul = staticmethod(elementwise.silu_and_mul)
    gelu_and_mul = staticmethod(elementwise.gelu_and_mul)
    argmax = staticmethod(sampling.argmax)
    sample = staticmethod(sampling.sample)
