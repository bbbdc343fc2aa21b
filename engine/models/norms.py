"""Normalisation of hidden states, and the small steps that a layer's functions are chained from.

A norm is called in two ways: `norm(x)`, and `norm.add(x, residual)`, which first adds x to the
residual (in place) and gives the norm of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels import KernelSet

Step = Callable[[Tensor], Tensor]


class Norm(Protocol):
    """What every norm can do. Tensors are [num_tokens, hidden_size]."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x, as a tensor of its own."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual` becomes x + residual; gives its norm."""


class RMSNorm:
    """x / rms(x) * weight, by the kernels."""

    __slots__ = ("_eps", "_fused", "_plain", "weight")

    def __init__(self, ops: KernelSet, weight: Tensor, eps: float) -> None:
        self._plain, self._fused = ops.rms_norm, ops.fused_add_rms_norm
        self.weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return self._plain(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `Norm`."""
        return self._fused(x, residual, self.weight, self._eps)


class LayerNorm:
    """(x - mean) / deviation, times the weight and plus the bias that the family has."""

    __slots__ = ("_eps", "_shape", "bias", "weight")

    def __init__(self, size: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self._shape, self.weight, self.bias, self._eps = (size,), weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return torch.nn.functional.layer_norm(x, self._shape, self.weight, self.bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `Norm`."""
        return self(residual.add_(x))


class NoNorm:
    """Leaves the residual as it is: for families that norm a block's output, not its input."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`: x itself."""
        return x

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `Norm`: the residual itself."""
        return residual.add_(x)


class Chain:
    """Steps one after another. `nbytes` counts the weights that a pass over one token reads."""

    __slots__ = ("nbytes", "steps")

    def __init__(self, *steps: Step) -> None:
        self.steps = steps
        self.nbytes = sum(int(getattr(step, "nbytes", 0)) for step in steps)

    def __call__(self, x: Tensor) -> Tensor:
        """The last step's result."""
        for step in self.steps:
            x = step(x)
        return x


def chain(first: Step, *steps: Step) -> Step:
    """`first` itself when nothing follows it."""
    return Chain(first, *steps) if steps else first


def steps_of(step: Step) -> list[Step]:
    """The steps that a step is chained from, itself where it is none."""
    if not isinstance(step, Chain):
        return [step]
    return [inner for part in step.steps for inner in steps_of(part)]


@dataclass(frozen=True, slots=True)
class Scaled:
    """Multiplication in place with a number."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        """x itself."""
        return x.mul_(self.factor)
