"""A mixture of experts in two grouped products, where the kernels have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.experts import ExpertWeights
from engine.models.moe import Router
from engine.models.norms import Step
from engine.models.spec import DecoderSpec
from kernels import KernelSet

FUSED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def fuses_experts(ops: KernelSet, spec: DecoderSpec, quantized: bool) -> bool:
    """Whether the kernels run all experts at once: unquantised ones, of known activations."""
    known = spec.gated and spec.activation in FUSED_ACTIVATIONS
    return ops.fuses_experts and known and not quantized


class FusedExperts:
    """Sum of the chosen experts' outputs, by the router's weights, without asking the device.

    Args:
        experts: of all, stacked here in `dtype` on the kernels' device.
        activation: one of `FUSED_ACTIVATIONS`.
    """

    def __init__(
        self,
        ops: KernelSet,
        router: Router,
        experts: Sequence[ExpertWeights],
        dtype: torch.dtype,
        activation: str,
        shared: Step | None,
    ) -> None:
        def stacked(parts: Sequence[Tensor], kept: torch.dtype) -> Tensor:
            return torch.stack([part.to(ops.device, kept) for part in parts])

        def biases(parts: Sequence[Tensor | None]) -> Tensor | None:
            there = [part for part in parts if part is not None]
            return stacked(there, torch.float32) if there else None

        ups, up_biases, downs, down_biases = zip(*experts, strict=True)
        self._up, self._down = stacked(ups, dtype), stacked(downs, dtype)
        self._up_bias, self._down_bias = biases(up_biases), biases(down_biases)
        self._ops, self._router, self._shared = ops, router, shared
        self._activation = activation
        read = self._up.nbytes + self._down.nbytes
        self.nbytes = read * router.top_k // len(experts) + router.linear.nbytes
        self.nbytes += int(getattr(shared, "nbytes", 0))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        router = self._router
        weights, ids = self._ops.route(
            router.linear(x),
            router.top_k,
            softmax_first=router.softmax_first,
            renormalize=router.renormalize,
        )
        out = self._ops.fused_experts(
            x,
            self._up,
            self._down,
            weights,
            ids,
            activation=self._activation,
            gate_up_bias=self._up_bias,
            down_bias=self._down_bias,
        )
        return out if self._shared is None else out.add_(self._shared(x))
