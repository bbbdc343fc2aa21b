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
    check_codes,
    check_coding,
    check_integer_weight,
    check_order,
    concatenate_rows,
    group_size_for,
)
from kernels.lora import LoraSlots, Place
from kernels.triton.attention import latent_attention, paged_attention
from kernels.triton.elementwise import fused_add_rms_norm, gelu_and_mul, rms_norm, silu_and_mul
from kernels.triton.launch import INTERPRETED
from kernels.triton.linear import BatchedHeadLinears, TorchLinear
from kernels.triton.lora import TritonLoraSlots
from kernels.triton.moe import fused_experts, route
from kernels.triton.quantized import (
    Int4Linear,
    Int8Linear,
    QuantisedLinear,
    coded_linear,
    grouped_experts,
    quantised_linear,
)
from kernels.triton.rope import rope_and_cache, rope_and_cache_latents
from kernels.triton.sampling import TritonLogitEdits, argmax, sample


class TritonKernels(KernelSet):
    """`KernelSet` of a GPU; of the CPU under TRITON_INTERPRET=1, to test it.

    Linear layers are cuBLAS's unless they are quantised. Activations are in the weights' own dtype.
    What a GPU would have to be asked about (positions, slots, block ids, lengths) isn't checked:
    shapes and dtypes are.
    """

    name = "triton"
    fuses_experts = True
    quantizations = ("int8", "int4", "fp8")
    supports_act_order = True
    edits = TritonLogitEdits()
    expert_rows: ClassVar[int | None] = None
    """Rows of a tile of quantised experts; None: by how many rows there are."""

    def __init__(self, device: torch.device | str, why: str) -> None:
        self.device = torch.device(device)
        self.why = why
        # Under the interpreter there is no backend to choose.
        self.has_own_attention = self.device.type == "cpu"

    @property
    def compute_capability(self) -> int | None:  # type: ignore[override]
        """As `KernelSet.compute_capability`; None under the interpreter."""
        if self.device.type != "cuda":
            return None
        major, minor = torch.cuda.get_device_capability(self.device)
        return major * 10 + minor

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        """The weights' dtype."""
        return weights

    def use_threads(
        self, count: int, cpus: Sequence[int] | None = None, *, spread: bool = True
    ) -> None:
        """Set torch's number of threads; nothing else runs on the CPU."""
        if count < 1:
            raise ValueError(f"the number of threads must be at least 1, got {count}")
        torch.set_num_threads(count)

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
            return self._quantised([weight], added, quantization, group_size)
        return TorchLinear(weight.to(self.device), added, round_inputs=round_inputs)

    def StreamedLinear(
        self,
        shape: tuple[int, int],
        pieces: Iterable[Tensor],
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        quantization: str | None = None,
        group_size: int | None = None,
        round_inputs: bool = False,
    ) -> LinearLayer:
        """As `KernelSet.StreamedLinear`; quantizes each row slice on the device."""
        made: Iterable[Tensor] = (piece.to(self.device) for piece in pieces)
        if quantization is None:
            weight = concatenate_rows(shape, (piece.to(dtype) for piece in made))
            return self.PackedLinear(weight, bias, round_inputs=round_inputs)
        added = None if bias is None else bias.to(self.device)
        layer = self._quantised(made, added, quantization, group_size)
        if (layer.out_features, layer.in_features) != shape:
            rows = layer.out_features
            raise ValueError(f"the pieces have {rows} rows, the weight {list(shape)}")
        return layer

    def _quantised(
        self,
        pieces: Iterable[Tensor],
        bias: Tensor | None,
        quantization: str,
        group_size: int | None,
    ) -> LinearLayer:
        if quantization not in self.quantizations:
            known = ", ".join(self.quantizations)
            raise ValueError(f"quantization must be one of {known}; got {quantization!r}")
        group = 0 if quantization == "fp8" else group_size_for(quantization, group_size)
        moved = (piece.to(self.device) for piece in pieces)
        return quantised_linear(moved, bias, quantization, group)

    def IntegerLinear(
        self,
        values: Tensor,
        scales: Tensor,
        minima: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        bits: int,
        zeros: Tensor | None = None,
    ) -> LinearLayer:
        """As `KernelSet.IntegerLinear`; zero points become float16 minima."""
        if bits == 8 and zeros is not None:
            raise ValueError("these kernels have no zero points of 8 bits")
        shape = check_integer_weight(values, scales, minima, bits, zeros)
        minima = minima if zeros is None else scales.float() * zeros.float()
        there = [None if x is None else x.to(self.device) for x in (values, scales, minima, bias)]
        kind = Int8Linear if bits == 8 else Int4Linear
        return kind(IntegerRows(*there[:3]), shape[1], there[3])  # type: ignore[arg-type]

    def StreamedIntegerLinear(
        self,
        shape: tuple[int, int],
        pieces: Iterable[IntegerRows],
        bias: Tensor | None = None,
        *,
        bits: int,
        group_size: int,
        with_minima: bool = False,
        with_zeros: bool = False,
        order: Tensor | None = None,
    ) -> LinearLayer:
        """As `KernelSet.StreamedIntegerLinear`; x is sorted once before each product."""
        check_order(order, shape[1])
        layer = super().StreamedIntegerLinear(
            shape, pieces, bias, bits=bits, group_size=group_size, with_minima=with_minima,
            with_zeros=with_zeros,
        )  # fmt: skip
        if order is not None:
            cast(QuantisedLinear, layer).sort_inputs(order.to(self.device, copy=True))
        return layer

    def keeps_code_format(self, coding: CodeFormat) -> bool:
        """Whether the codes are e4m3 in groups that are whole blocks of a product."""
        size = coding.group_size
        return coding.kind == "e4m3" and size >= 32 and size & (size - 1) == 0

    def StreamedCodedLinear(
        self,
        shape: tuple[int, int],
        pieces: Iterable[CodeRows],
        bias: Tensor | None = None,
        *,
        coding: CodeFormat,
    ) -> LinearLayer:
        """As `KernelSet.StreamedCodedLinear`; x is rounded to e4m3, as with "fp8"."""
        check_coding(coding)
        if not self.keeps_code_format(coding):
            return super().StreamedCodedLinear(shape, pieces, bias, coding=coding)
        scales: list[Tensor] = []

        def codes() -> Iterator[Tensor]:
            for piece in pieces:
                check_codes(piece, shape[1], coding)
                scales.append(piece.scales.to(self.device, torch.float32, copy=True))
                yield piece.codes.to(self.device)

        whole, added = (
            concatenate_rows(shape, codes()),
            None if bias is None else bias.to(self.device),
        )
        return coded_linear(whole, torch.cat(scales), added, coding.group_size)

    def compile_experts(self, experts: ExpertLayers) -> MixtureOfExperts:
        """Experts of one quantized format run in one call, others one after the other."""
        fused = grouped_experts(self, experts, self.expert_rows)
        return super().compile_experts(experts) if fused is None else fused

    def lora_slots(
        self,
        places: Mapping[Place, int],
        most: int,
        most_rank: int,
        dtype: torch.dtype,
        experts: int = 0,
    ) -> LoraSlots:
        alike = self.batch_invariant
        return TritonLoraSlots(
            places, most, most_rank, dtype, self.device, alike=alike, experts=experts
        )

    def head_linears(self, layers: Sequence[LinearLayer]) -> PerHeadLinear:
        return BatchedHeadLinears(layers)

    rms_norm = staticmethod(rms_norm)
    fused_add_rms_norm = staticmethod(fused_add_rms_norm)
    rope_and_cache = staticmethod(rope_and_cache)
    rope_and_cache_mla = staticmethod(rope_and_cache_latents)
    paged_attention = staticmethod(paged_attention)
    mla_attention = staticmethod(latent_attention)
    silu_and_mul = staticmethod(silu_and_mul)
    gelu_and_mul = staticmethod(gelu_and_mul)
    route = staticmethod(route)
    fused_experts = staticmethod(fused_experts)
    argmax = staticmethod(argmax)
    sample = staticmethod(sample)


def load(
    device: torch.device | str = "cuda", make: type[TritonKernels] = TritonKernels
) -> TritonKernels:
    """The kernels of a device. Raises `KernelsUnavailable` where they can't run."""
    kind = torch.device(device).type
    if kind == "cuda":
        if INTERPRETED:
            raise KernelsUnavailable("TRITON_INTERPRET is set: kernels would run on the CPU")
        name = torch.cuda.get_device_name(device)
        return make(device, f"Triton compiles for {name}")
    if not INTERPRETED:
        raise KernelsUnavailable(f"Triton kernels on {kind} need TRITON_INTERPRET=1")
    return make(device, "asked for, in Triton's interpreter: only to test them")
