"""The feed-forward part of a layer: gated or plain."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.norms import Step
from kernels import KernelSet


def gated_activation(ops: KernelSet, name: str, limit: float = 0.0, alpha: float = 1.702) -> Step:
    """[T, 2I] -> [T, I]: the first half activated, times the second."""
    if name == "silu":
        return ops.silu_and_mul
    if name == "gelu":
        return ops.gelu_and_mul
    if name == "gelu_tanh":
        return lambda x: ops.gelu_and_mul(x, approximate="tanh")
    if name == "swiglu_clamped":
        return lambda x: _swiglu_clamped(x, limit, alpha)
    plain = activation(name)

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return plain(gate) * up

    return gated


def _swiglu_clamped(x: Tensor, limit: float, alpha: float) -> Tensor:
    """gpt-oss: both halves are clamped, and the second one counts from 1."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gate * alpha)


def activation(name: str) -> Step:
    """An activation by itself. Raises KeyError for one that isn't known."""
    return _ACTIVATIONS[name]


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square_()


_ACTIVATIONS: dict[str, Step] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
    "relu2": _relu2,
}
