"""Linear layers by cuBLAS through torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from kernels.layers import LinearLayer, PerHeadLinear
from kernels.reference.linear import ReferenceLinear
from kernels.tensors import describe


class TorchLinear(ReferenceLinear):
    """`torch.nn.functional.linear` in x's dtype, without copies if the weight has that dtype."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.dtype != self.weight.dtype or out is not None:
            return super().__call__(x, out)
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = self.bias = bias.to(x.dtype)
        return torch.nn.functional.linear(x, self.weight, bias)

    def rows(self, ids: Tensor) -> Tensor:
        """See `LinearLayer.rows`; ids aren't checked, since that would wait for the GPU."""
        if ids.device.type == "cpu":
            return super().rows(ids)
        return self.weight[ids].float()


class BatchedHeadLinears(PerHeadLinear):
    """The linear layers of all heads in one cuBLAS call, on contiguous weights [heads, N, K]."""

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        """Raises ValueError for layers of other kernels or of different shapes."""
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
            # The layers share the stacked weight, so that nothing is stored twice.
            self.weight[head] = layer.weight
            layer.weight = self.weight[head]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See `PerHeadLinear.__call__`; x and out have the weights' dtype."""
        check_heads(x, out, self.weight)
        torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2), out=out.transpose(0, 1))

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight}


def check_heads(x: Tensor, out: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless x [T, heads, K] and out [T, heads, N] fit weight [heads, N, K], have
    its dtype, and are contiguous within a head.
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
