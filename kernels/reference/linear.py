"""Linear layers in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import LinearLayer
from kernels.linear_factory import group_size_for


def quantize(weight: Tensor, quantization: str, group: int) -> tuple[Tensor, Tensor]:
    """Quantize weight [N, K] to int8 [N, groups * group] and scales float32 [N, groups].

    int8 uses [-127, 127] and maps a group's largest magnitude to 127. int4 uses [0, 15] with 8 for
    zero, and maps the value of largest magnitude to -8 or nearby, wherever the group's squared
    error is smallest. Rows are padded with zeros to whole groups.
    """
    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -width % group))
    grouped = padded.view(rows, -1, group)
    if quantization == "int8":
        scales = as_stored(grouped.abs().amax(-1) / 127)
        return levels(grouped, scales, -127, 127).flatten(1), scales
    index = grouped.abs().argmax(-1, keepdim=True)
    top = grouped.gather(-1, index).squeeze(-1)
    tried = torch.stack([as_stored(top / (-8 + 0.1 * step)) for step in range(-4, 11)])
    errors = torch.stack([_error(grouped, scales) for scales in tried])
    scales = tried.gather(0, errors.argmin(0, keepdim=True)).squeeze(0)
    return levels(grouped, scales, -8, 7).flatten(1) + 8, scales


def as_stored(scales: Tensor) -> Tensor:
    """Round to float16, in which scales are stored."""
    return scales.half().float()


def levels(grouped: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """Return the integers nearest to grouped [N, groups, group] / scales."""
    inverse = torch.where(scales != 0, 1 / scales, 0.0)
    return (grouped * inverse[..., None]).round().clamp(low, high).to(torch.int8)


def _error(grouped: Tensor, scales: Tensor) -> Tensor:
    rounded = levels(grouped, scales, -8, 7) * scales[..., None]
    return (rounded - grouped).square().sum(-1)


def dequantize(
    values: Tensor,
    scales: Tensor,
    minima: Tensor | None,
    bits: int,
    zeros: Tensor | None = None,
) -> Tensor:
    """Return the weights that integers represent, float32 [N, K]; see `IntegerRows`."""
    rows, groups = scales.shape
    grouped = values.view(rows, groups, -1).float()
    float_scales = as_stored(scales.float())[..., None]
    if minima is not None:
        return (grouped * float_scales - as_stored(minima.float())[..., None]).flatten(1)
    if zeros is not None:
        return ((grouped - zeros.float()[..., None]) * float_scales).flatten(1)
    return ((grouped - (0 if bits == 8 else 8)) * float_scales).flatten(1)


class ReferenceLinear(LinearLayer):
    """`torch.nn.functional.linear`; quantized weights are stored as rounded floats in their dtype.

    `round_inputs` is a permission that this class doesn't use.
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
        weight, bias = self.weight, self.bias
        if weight.dtype != x.dtype:
            weight, bias = weight.float(), None if bias is None else bias.float()
        if bias is not None and bias.dtype != weight.dtype:
            bias = bias.to(weight.dtype)
        result = torch.nn.functional.linear(x.to(weight.dtype), weight, bias)
        return result.to(x.dtype) if out is None else out.copy_(result)

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"weight": self.weight, "bias": self.bias}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def rows(self, ids: Tensor) -> Tensor:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise ValueError("a requested row doesn't exist")
        return self.weight[ids].float()
