"""A device that holds nothing: torch's "meta". What forgets to go there raises.

Operations between tensors of different devices fail there as on a GPU, and so does whatever looks
at a value.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kernels.attention_args import AttentionArgs, MlaArgs
from kernels.interface import LinearLayer, ScanInputs, ScanWeights, StateRows
from kernels.ssm import check_conv, check_diagonal, check_scan
from kernels.triton import TritonKernels
from kernels.triton.linear import TorchLinear

META = torch.device("meta")


def on_meta_only(*values: Any) -> None:
    """Raise RuntimeError unless all tensors are on the device."""
    for value in values:
        if isinstance(value, Tensor) and value.device != META:
            raise RuntimeError(f"a kernel was given a tensor on {value.device}")


class MetaKernels(TritonKernels):
    """The Triton set's way of placing weights, and kernels that only know shapes."""

    def __init__(self) -> None:
        super().__init__(META, "a test")

    def PackedLinear(self, weight: Tensor, bias: Tensor | None = None, **more: Any) -> LinearLayer:
        return TorchLinear(weight.to(META), None if bias is None else bias.to(META))

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        on_meta_only(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        on_meta_only(x, residual, weight)
        return torch.empty_like(x)

    @staticmethod
    def rope_and_cache(*args: Any, **options: Any) -> None:
        on_meta_only(*args, *options.values())

    @staticmethod
    def paged_attention(args: AttentionArgs) -> Tensor:
        on_meta_only(*(getattr(args, field.name) for field in fields(args)))
        return torch.empty(args.q.shape, dtype=args.q.dtype, device=META)

    @staticmethod
    def rope_and_cache_mla(*args: Any, **options: Any) -> None:
        on_meta_only(*args, *options.values())

    @staticmethod
    def mla_attention(args: MlaArgs) -> Tensor:
        on_meta_only(*(getattr(args, field.name) for field in fields(args)))
        return args.new_out()

    @staticmethod
    def causal_conv(
        x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, of: StateRows,
        *, silu: bool = True,
    ) -> Tensor:  # fmt: skip
        on_meta_only(x, states, weight, bias, of.starts, of.rows, of.saves)
        check_conv(x, states, weight, bias, of)
        return torch.empty_like(x)

    @staticmethod
    def linear_scan(
        inputs: ScanInputs, weights: ScanWeights, states: Tensor, of: StateRows,
        scales: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        values = [getattr(part, f.name) for part in (inputs, weights, of) for f in fields(part)]
        on_meta_only(*values, states, scales)
        check_scan(inputs, weights, states, scales)
        return torch.empty_like(inputs.v)

    @staticmethod
    def diagonal_scan(x: Tensor, decay: Tensor, states: Tensor, of: StateRows) -> Tensor:
        on_meta_only(x, decay, states, of.starts, of.rows, of.saves)
        check_diagonal(x, decay, states)
        return torch.empty_like(x)

    @staticmethod
    def encoder_attention(q: Tensor, k: Tensor, v: Tensor, length: int, **more: Any) -> Tensor:
        on_meta_only(q, k, v)
        return torch.empty(q.shape, dtype=q.dtype, device=META)

    @staticmethod
    def silu_and_mul(x: Tensor, *args: Any, approximate: str = "") -> Tensor:
        on_meta_only(x, *args)
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))

    gelu_and_mul = silu_and_mul

    @staticmethod
    def route(scores: Tensor, top_k: int, **more: Any) -> tuple[Tensor, Tensor]:
        on_meta_only(scores, *more.values())
        weights = scores.new_empty((len(scores), top_k), dtype=torch.float32)
        return weights, weights.int()

    @staticmethod
    def fused_experts(x: Tensor, *args: Any, **more: Any) -> Tensor:
        on_meta_only(x, *args, *more.values())
        return torch.empty_like(x)
