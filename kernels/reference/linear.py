"""Linear layers in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import LinearLayer


class ReferenceLinear(LinearLayer):
    """`torch.nn.functional.linear`; quantised weights are kept as values on their grid."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, quantization: str | None = None
    ) -> None:
        if quantization is not None:
            raise ValueError(f"the reference has no quantization {quantization!r}")
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.numel() * weight.element_size()
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        bias = self.bias
        if self.weight.dtype == x.dtype:
            result = torch.nn.functional.linear(x, self.weight, bias)
        else:
            wide_bias = None if bias is None else bias.float()
            result = torch.nn.functional.linear(x.float(), self.weight.float(), wide_bias)
        if out is None:
            return result.to(x.dtype)
        return out.copy_(result)
