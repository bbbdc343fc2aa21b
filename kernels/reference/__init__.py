"""Plain torch versions of the kernels: the oracle of the tests, and the fallback.

They run in float32 inside (float64 for float64 inputs, so that they can be their own judge), on
any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels.cpu.memory import lazy_zeros
from kernels.interface import KernelSet
from kernels.reference import attention, elementwise, sampling
from kernels.reference.linear import ReferenceLinear, integer_linear


class ReferenceKernels(KernelSet):
    """`KernelSet` made of the functions of this package."""

    name = "reference"

    def __init__(self, why: str = "asked for", device: torch.device | str = "cpu") -> None:
        self.why = why
        self.device = torch.device(device)
        self.has_own_attention = self.device.type == "cpu"

    def use_threads(
        self, count: int, cpus: Sequence[int] | None = None, *, spread: bool = True
    ) -> None:
        """Set torch's number of threads; they aren't bound to CPUs."""
        if count < 1:
            raise ValueError(f"the number of threads must be at least 1, got {count}")
        torch.set_num_threads(count)

    def new_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "cpu":
            return lazy_zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def PackedLinear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
    ) -> ReferenceLinear:
        """As `KernelSet.PackedLinear`; moves the weight to this set's device."""
        added = None if bias is None else bias.to(self.device)
        return ReferenceLinear(weight.to(self.device), added, **options)

    def IntegerLinear(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        minima: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        bits: int,
        zeros: torch.Tensor | None = None,
    ) -> ReferenceLinear:
        layer = integer_linear(values, scales, minima, bias, bits=bits, zeros=zeros)
        return self.PackedLinear(layer.weight, layer.bias)

    rms_norm = staticmethod(elementwise.rms_norm)
    fused_add_rms_norm = staticmethod(elementwise.fused_add_rms_norm)
    rope_and_cache = staticmethod(elementwise.rope_and_cache)
    paged_attention = staticmethod(attention.paged_attention)
    mla_attention = staticmethod(attention.latent_attention)
    silu_and_mul = staticmethod(elementwise.silu_and_mul)
    gelu_and_mul = staticmethod(elementwise.gelu_and_mul)
    argmax = staticmethod(sampling.argmax)
    sample = staticmethod(sampling.sample)
