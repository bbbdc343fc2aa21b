"""Linear layers in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import LinearLayer
from kernels.quantization import check_whole, group_size_for
from kernels.reference.quantization import dequantize, quantize


class ReferenceLinear(LinearLayer):
    """`torch.nn.functional.linear`; quantised weights are values on their grid, in their dtype.

    `round_inputs` is only a permission, which this class has no use for.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        quantization: str | None = None,
        group_size: int | None = None,
        round_inputs: bool = False,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.numel() * weight.element_size()
        if quantization is not None:
            group = group_size_for(quantization, group_size)
            values, scales = quantize(weight, quantization, group)
            rounded = dequantize(values, scales, None, int(quantization.removeprefix("int")))
            weight = rounded[:, : self.in_features].to(weight.dtype)
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `LinearLayer.__call__`."""
        weight, bias = self.weight, self.bias
        if weight.dtype != x.dtype:
            weight, bias = weight.float(), None if bias is None else bias.float()
        if bias is not None and bias.dtype != weight.dtype:
            bias = bias.to(weight.dtype)
        result = torch.nn.functional.linear(x.to(weight.dtype), weight, bias)
        return result.to(x.dtype) if out is None else out.copy_(result)

    def tensors(self) -> dict[str, Tensor]:
        """See `LinearLayer.tensors`."""
        held = {"weight": self.weight, "bias": self.bias}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def rows(self, ids: Tensor) -> Tensor:
        """See `LinearLayer.rows`."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise ValueError("a row that is wanted isn't there")
        return self.weight[ids].float()


def integer_linear(
    values: Tensor,
    scales: Tensor,
    minima: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int,
    zeros: Tensor | None = None,
) -> ReferenceLinear:
    """See `KernelSet.IntegerLinear`."""
    check_whole(values, scales, minima, bits, zeros)
    return ReferenceLinear(dequantize(values, scales, minima, bits, zeros), bias)
