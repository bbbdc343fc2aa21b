"""`TritonKernels`: the operations of this package as a `KernelSet`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor

from kernels.errors import KernelsUnavailable
from kernels.interface import ExpertLayers, IntegerRows, KernelSet, LinearLayer, MixtureOfExperts
from kernels.layers import PerHeadLinear
from kernels.linear_factory import (
    CodeFormat,
    CodeRows,
    FloatFormat,
    IntegerFormat,
    RowSlice,
    WeightFormat,
    check_codes,
    check_coding,
    concatenate_rows,
    group_size_for,
    join_dequantized,
    join_integers,
)
from kernels.lora import LoraSlots, LoraTarget
from kernels.triton.attention import encoder_attention, latent_attention, paged_attention
from kernels.triton.elementwise import fused_add_rms_norm, gelu_and_mul, rms_norm, silu_and_mul
from kernels.triton.launch import INTERPRETED, ON_AMD
from kernels.triton.linear import BatchedHeadLinears, TorchLinear
from kernels.triton.lora import TritonLoraSlots
from kernels.triton.moe import fused_experts, route
from kernels.triton.quantized import (
    Int4Linear,
    Int8Linear,
    coded_linear,
    grouped_experts,
    quantized_linear,
)
from kernels.triton.rope import rope_and_cache, rope_and_cache_latents
from kernels.triton.sampling import TritonLogitEdits, argmax, sample
from kernels.triton.states import causal_conv, diagonal_scan, linear_scan


class TritonKernels(KernelSet):
    """`KernelSet` of a GPU; of the CPU under TRITON_INTERPRET=1, for tests.

    Linear layers are cuBLAS's unless they are quantized. Activations have the weights' dtype.
    Shapes and dtypes are checked, but not what only the GPU knows: positions, slots, block ids and
    lengths.
    """

    name = "triton"
    fuses_experts = True
    quantizations = ("int8", "int4", "fp8")
    supports_act_order = True
    edits = TritonLogitEdits()
    expert_rows: ClassVar[int | None] = None
    """Rows per tile of quantized experts; None chooses it by the number of rows."""

    def __init__(self, device: torch.device | str, why: str) -> None:
        self.device = torch.device(device)
        self.why = why
        # In the interpreter there is no backend to choose.
        self.has_own_attention = self.device.type == "cpu"

    @property
    def compute_capability(self) -> int | None:  # type: ignore[override]
        """See `KernelSet.compute_capability`; None in the interpreter and on AMD GPUs."""
        if self.device.type != "cuda" or ON_AMD:
            return None
        major, minor = torch.cuda.get_device_capability(self.device)
        return major * 10 + minor

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def new_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def PackedLinear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        quantization: str | None = None,
        group_size: int | None = None,
        round_inputs: bool = False,
    ) -> LinearLayer:
        added = None if bias is None else bias.to(self.device)
        if quantization is not None:
            return self._quantized([weight], added, quantization, group_size)
        return TorchLinear(weight.to(self.device), added, round_inputs=round_inputs)

    def make_linear(
        self,
        shape: tuple[int, int],
        slices: Iterable[RowSlice],
        form: WeightFormat,
        bias: Tensor | None = None,
    ) -> LinearLayer:
        if isinstance(form, FloatFormat):
            return self._float_linear(shape, cast(Iterable[Tensor], slices), form, bias)
        if isinstance(form, IntegerFormat):
            return self._integer_linear(shape, cast(Iterable[IntegerRows], slices), form, bias)
        return self._coded_linear(shape, cast(Iterable[CodeRows], slices), form, bias)

    def _float_linear(
        self,
        shape: tuple[int, int],
        slices: Iterable[Tensor],
        form: FloatFormat,
        bias: Tensor | None,
    ) -> LinearLayer:
        """Pack float rows, quantizing each row slice on the device."""
        moved = (part.to(self.device) for part in slices)
        if form.quantization is None:
            weight = concatenate_rows(shape, (part.to(form.dtype) for part in moved))
            return self.PackedLinear(weight, bias, round_inputs=form.round_inputs)
        added = None if bias is None else bias.to(self.device)
        layer = self._quantized(moved, added, form.quantization, form.group_size)
        if (layer.out_features, layer.in_features) != shape:
            rows = layer.out_features
            raise ValueError(f"the pieces have {rows} rows, the weight {list(shape)}")
        return layer

    def _quantized(
        self,
        slices: Iterable[Tensor],
        bias: Tensor | None,
        quantization: str,
        group_size: int | None,
    ) -> LinearLayer:
        if quantization not in self.quantizations:
            supported = ", ".join(self.quantizations)
            raise ValueError(f"quantization must be one of {supported}; got {quantization!r}")
        group = 0 if quantization == "fp8" else group_size_for(quantization, group_size)
        moved = (row_slice.to(self.device) for row_slice in slices)
        return quantized_linear(moved, bias, quantization, group)

    def _integer_linear(
        self,
        shape: tuple[int, int],
        slices: Iterable[IntegerRows],
        form: IntegerFormat,
        bias: Tensor | None,
    ) -> LinearLayer:
        """Pack integers. Zero points become float16 minima; with a column order, x is sorted before
        each product.
        """
        order = form.column_order(shape[1])
        if form.bits == 8 and form.with_zeros:
            raise ValueError("these kernels have no zero points of 8 bits")
        rows = join_integers(shape, slices, form)
        minima = rows.minima if rows.zeros is None else rows.scales.float() * rows.zeros.float()
        moved = [
            None if x is None else x.to(self.device)
            for x in (rows.values, rows.scales, minima, bias)
        ]
        kind = Int8Linear if form.bits == 8 else Int4Linear
        layer = kind(IntegerRows(*moved[:3]), shape[1], moved[3])  # type: ignore[arg-type]
        if order is not None:
            layer.sort_inputs(order.to(self.device, copy=True))
        return layer

    def keeps_code_format(self, coding: CodeFormat) -> bool:
        """Return whether the codes are e4m3 in groups of 32, 64 or a larger power of two."""
        size = coding.group_size
        return coding.kind == "e4m3" and size >= 32 and size & (size - 1) == 0

    def _coded_linear(
        self,
        shape: tuple[int, int],
        slices: Iterable[CodeRows],
        form: CodeFormat,
        bias: Tensor | None,
    ) -> LinearLayer:
        """Pack codes. x is rounded to e4m3, as with "fp8"."""
        check_coding(form)
        if not self.keeps_code_format(form):
            return self.PackedLinear(join_dequantized(shape, slices, form), bias)
        scales: list[Tensor] = []

        def codes() -> Iterator[Tensor]:
            for part in slices:
                check_codes(part, shape[1], form)
                scales.append(part.scales.to(self.device, torch.float32, copy=True))
                yield part.codes.to(self.device)

        weight, added = (
            concatenate_rows(shape, codes()),
            None if bias is None else bias.to(self.device),
        )
        return coded_linear(weight, torch.cat(scales), added, form.group_size)

    def compile_experts(self, experts: ExpertLayers) -> MixtureOfExperts:
        """Return experts that run in one call if they share a quantized format, else expert by
        expert.
        """
        fused = grouped_experts(self, experts, self.expert_rows)
        return super().compile_experts(experts) if fused is None else fused

    def lora_slots(
        self,
        targets: Mapping[LoraTarget, int],
        max_adapters: int,
        max_rank: int,
        dtype: torch.dtype,
        experts: int = 0,
    ) -> LoraSlots:
        alike = self.batch_invariant
        return TritonLoraSlots(
            targets, max_adapters, max_rank, dtype, self.device, alike=alike, experts=experts
        )

    def head_linears(self, layers: Sequence[LinearLayer]) -> PerHeadLinear:
        return BatchedHeadLinears(layers)

    rms_norm = staticmethod(rms_norm)
    fused_add_rms_norm = staticmethod(fused_add_rms_norm)
    rope_and_cache = staticmethod(rope_and_cache)
    rope_and_cache_mla = staticmethod(rope_and_cache_latents)
    paged_attention = staticmethod(paged_attention)
    encoder_attention = staticmethod(encoder_attention)
    mla_attention = staticmethod(latent_attention)
    silu_and_mul = staticmethod(silu_and_mul)
    gelu_and_mul = staticmethod(gelu_and_mul)
    route = staticmethod(route)
    fused_experts = staticmethod(fused_experts)
    causal_conv = staticmethod(causal_conv)
    linear_scan = staticmethod(linear_scan)
    diagonal_scan = staticmethod(diagonal_scan)
    argmax = staticmethod(argmax)
    sample = staticmethod(sample)


def load(
    device: torch.device | str = "cuda", make: type[TritonKernels] = TritonKernels
) -> TritonKernels:
    """Return the kernels of a device. Raises `KernelsUnavailable` if they can't run there."""
    kind = torch.device(device).type
    if kind == "cuda":
        if INTERPRETED:
            raise KernelsUnavailable("TRITON_INTERPRET is set: kernels would run on the CPU")
        name = torch.cuda.get_device_name(device)
        return make(device, f"Triton compiles for {name}")
    if not INTERPRETED:
        raise KernelsUnavailable(f"Triton kernels on {kind} need TRITON_INTERPRET=1")
    return make(device, "asked for, in Triton's interpreter: only to test them")
