"""A mixture of experts in two grouped products, where the kernels have them."""

from __future__ import annotations

from collections.abc import Iterable

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


def _stacked(
    experts: Iterable[ExpertWeights], count: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor | None]:
    """Each of the four tensors of an expert, for all of them: [count, ...]; biases in float32.

    Of the host's memory only one expert is taken at a time.
    """
    found: list[Tensor | None] = [None] * 4
    for index, expert in enumerate(experts):
        for place, part in enumerate(expert):
            if part is None:
                continue
            whole = found[place]
            if whole is None:
                kept = torch.float32 if place % 2 else dtype
                whole = torch.empty((count, *part.shape), dtype=kept, device=device)
                found[place] = whole
            whole[index].copy_(part)
    return found


class FusedExperts:
    """Sum of the chosen experts' outputs, by the router's weights, without asking the device.

    Args:
        experts: one after the other, stacked in `dtype` on the kernels' device as they come.
        count: of them.
        activation: one of `FUSED_ACTIVATIONS`.
    """

    def __init__(
        self,
        ops: KernelSet,
        router: Router,
        experts: Iterable[ExpertWeights],
        count: int,
        dtype: torch.dtype,
        activation: str,
        shared: Step | None,
    ) -> None:
        up, self._up_bias, down, self._down_bias = _stacked(experts, count, dtype, ops.device)
        if up is None or down is None:
            raise ValueError("a mixture of no experts")
        self._up, self._down = up, down
        self._ops, self._router, self._shared = ops, router, shared
        self._activation = activation
        read = self._up.nbytes + self._down.nbytes
        self.nbytes = read * router.top_k // count + router.linear.nbytes
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
