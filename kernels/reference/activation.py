"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.norm import wide


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2I] -> silu(first half) * second half."""
    gate, up = wide(x).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """x [T, 2I] -> gelu(first half) * second half; approximate: "none" or "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate must be "none" or "tanh", got {approximate!r}')
    gate, up = wide(x).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate=approximate) * up).to(x.dtype)
