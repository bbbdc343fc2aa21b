"""Linear layers: cuBLAS by way of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from kernels.layers import LinearLayer, PerHeadLinear
from kernels.reference.linear import ReferenceLinear
from kernels.tensors import describe


class TorchLinear(ReferenceLinear):
    """`torch.nn.functional.linear` in x's dtype, without copies where weight and x agree."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.dtype != self.weight.dtype or out is not None:
            return super().__call__(x, out)
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = self.bias = bias.to(x.dtype)
        return torch.nn.functional.linear(x, self.weight, bias)

    def rows(self, ids: Tensor) -> Tensor:
        """As `LinearLayer.rows`, but unchecked: a check would wait for the GPU."""
        if ids.device.type == "cpu":
            return super().rows(ids)
        return self.weight[ids].float()


class BatchedHeadLinears(PerHeadLinear):
    """All heads by one call of cuBLAS, on weights [heads, N, K] that lie side by side."""

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        """Raises ValueError for layers of other kernels, or of several shapes."""
        super().__init__(layers)
        torch_layers = [layer for layer in layers if isinstance(layer, TorchLinear)]
        if len(torch_layers) != len(layers) or any(
            layer.bias is not None for layer in torch_layers
        ):
            raise ValueError("the heads' layers are none of these kernels, or have a bias")
        first = torch_layers[0].weight
        self.weight = torch.empty(
            (len(torch_layers), *first.shape), dtype=first.dtype, device=first.device
        )
        for head, layer in enumerate(torch_layers):
            # Nothing is held twice.
            self.weight[head] = layer.weight
            layer.weight = self.weight[head]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """As `PerHeadLinear.__call__`; x and out have the weights' dtype."""
        check_heads(x, out, self.weight)
        torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2), out=out.transpose(0, 1))

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight}


def check_heads(x: Tensor, out: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless x [T, heads, K] and out [T, heads, N] go with weight [heads, N, K]:
    of one dtype, each head's values side by side.
    """
    heads, n, k = cast("tuple[int, int, int]", tuple(weight.shape))
    rows = len(x)
    if x.shape != (rows, heads, k) or out.shape != (rows, heads, n):
        raise ValueError(
            f"x {describe(x)} and out {describe(out)} must be [T, {heads}, {k}] and "
            f"[T, {heads}, {n}]"
        )
    if not x.dtype == out.dtype == weight.dtype:
        raise ValueError(
            f"x {describe(x)} and out {describe(out)} must be of the weights' dtype, {weight.dtype}"
        )
    if (x.stride(2) != 1 and k > 1) or (out.stride(2) != 1 and n > 1):
        raise ValueError("a head's values must lie side by side")
