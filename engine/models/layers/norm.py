"""Norms of hidden states, and other functions from which plain layers are composed.

A norm is called in two ways: `norm(x)`, and `norm.add_and_norm(x, residual)`, which first adds x to
the residual in place and returns the norm of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels import KernelSet
from kernels.interface import MlpWeights, NormWeights
from kernels.layers import gated_activation

#: A function of a tensor's rows, independent of each other.
Transform = Callable[[Tensor], Tensor]


class Norm(Protocol):
    """Interface of all norms. Tensors are [num_tokens, hidden_size]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x as a new tensor."""

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place, and return the norm of the sum."""


class RMSNorm:
    """x / rms(x) * weight, computed by the kernels."""

    __slots__ = ("_eps", "_fused", "_rms_norm", "weight")

    def __init__(self, ops: KernelSet, weight: Tensor, eps: float) -> None:
        self._rms_norm, self._fused = ops.rms_norm, ops.fused_add_rms_norm
        self.weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self._eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `Norm`."""
        return self._fused(x, residual, self.weight, self._eps)


class LayerNorm:
    """(x - mean) / deviation * weight + bias, with the weight and bias that the family has."""

    __slots__ = ("_eps", "_shape", "bias", "weight")

    def __init__(self, size: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self._shape, self.weight, self.bias, self._eps = (size,), weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, self._shape, self.weight, self.bias, self._eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `Norm`."""
        return self(residual.add_(x))


class NoNorm:
    """Returns the residual unchanged, for families with norms of outputs instead of inputs."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `Norm`; returns the residual itself."""
        return residual.add_(x)


class Sequential:
    """Functions that are applied one after another."""

    __slots__ = ("_links",)

    def __init__(self, *links: Transform) -> None:
        self._links = links

    def __call__(self, x: Tensor) -> Tensor:
        """Return the last one's result."""
        for link in self._links:
            x = link(x)
        return x


def chain(first: Transform, *more: Transform) -> Transform:
    """Compose functions; returns `first` itself if there are no more."""
    return Sequential(first, *more) if more else first


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiplication by a number in place."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return x itself."""
        return x.mul_(self.factor)


@dataclass(frozen=True, slots=True)
class ScaleGate:
    """Multiplication of the first half of each row by a number in place."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return x itself."""
        x[:, : x.shape[1] // 2].mul_(self.factor)
        return x


def scaled(first: Transform, factor: float) -> Transform:
    """Return `first` with its result multiplied by `factor`."""
    return first if factor == 1.0 else Sequential(first, Scale(factor))


def make_norm(ops: KernelSet, norm: NormWeights, size: int, eps: float) -> Norm:
    """Return a norm over `size` values."""
    if norm.kind == "rms" and norm.weight is not None:
        return RMSNorm(ops, norm.weight, eps)
    return NoNorm() if norm.kind == "none" else LayerNorm(size, norm.weight, norm.bias, eps)


def mlp_of(ops: KernelSet, mlp: MlpWeights, gate_scale: float = 1.0) -> Transform:
    """Return up, the activation, down. `gate_scale` multiplies a gated MLP's activated half."""
    spec = mlp.activation
    act = gated_activation(ops, spec) if mlp.gated else ops.activation(spec.name)
    scale = [] if gate_scale == 1.0 else [ScaleGate(gate_scale)]
    return Sequential(mlp.up, *scale, act, mlp.down)
