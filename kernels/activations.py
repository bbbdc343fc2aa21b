"""The activations of MLPs by their names, on any set of kernels: alone, or gated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kernels.layers import ActivationSpec

Activation = Callable[[Tensor], Tensor]


class GatedKernels(Protocol):
    """The gated activations that each set of kernels has: [T, 2I] -> [T, I]."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """SiLU of the first half, times the second."""

    def gelu_and_mul(self, x: Tensor, *, approximate: str = "none") -> Tensor:
        """GELU of the first half, times the second. `approximate`: as torch's."""


def activation(name: str) -> Activation:
    """An activation by itself. Raises KeyError for one that isn't known."""
    return _PLAIN[name]


def gated_activation(ops: GatedKernels, spec: ActivationSpec) -> Activation:
    """[T, 2I] -> [T, I]: the first half activated, times the second.

    Raises KeyError for one that isn't known.
    """
    if spec.name == "silu":
        return ops.silu_and_mul
    if spec.name == "gelu":
        return ops.gelu_and_mul
    if spec.name == "gelu_tanh":
        return lambda x: ops.gelu_and_mul(x, approximate="tanh")
    if spec.name == "swiglu_clamped":
        return lambda x: _swiglu_clamped(x, spec.limit, spec.alpha)
    plain = activation(spec.name)

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return plain(gate) * up

    return gated


def _swiglu_clamped(x: Tensor, limit: float, alpha: float) -> Tensor:
    """gpt-oss: both halves are clamped, and the second one counts from 1."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gate * alpha)


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square_()


_PLAIN: dict[str, Activation] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
    "relu2": _relu2,
}
ACTIVATIONS = (*_PLAIN, "swiglu_clamped")
"""All that there are."""
