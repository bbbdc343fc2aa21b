"""Products of e4m3 by the GPU vendor's library, by way of torch, where rows are many.

There a product is bound by the matrix units, which the library keeps busy with asynchronous copies
and warps of their own for them; few rows wait for the weights alone, and our kernel reads those as
fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton.launch import Target

MANY_ROWS = 256
"""From so many on: a guess until it is measured.

A byte of the weights is multiplied 2 * rows times. Fewer rows than half of (products a second /
bytes a second) wait for the weights, whoever multiplies: 206 on an H200, 281 on a B200, 295 on an
H100, by their makers' figures. From there on the matrix units are what is short.
"""
CAPABILITIES = (90, 100, 103)
"""What torch has products with a scale a row and a column for, times ten."""
_MULTIPLE = 16
"""Both sides of the weights must be multiples of it."""


def library_multiplies(rows: int, weight: Tensor, dtype: torch.dtype, target: Target) -> bool:
    """Whether torch has the product of so many rows with `weight` [N, K], as `dtype`."""
    return (
        rows >= MANY_ROWS
        and target.capability in CAPABILITIES
        and dtype == torch.bfloat16
        and all(side % _MULTIPLE == 0 for side in weight.shape)
        and hasattr(torch, "_scaled_mm")
    )


def scaled_product(
    out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None
) -> None:
    """out bfloat16 [M, N] = x weight^T, times x_scales [M] and scales [N], plus bias [N].

    x uint8 [M, K] and weight uint8 [N, K] are bits of e4m3. Sums are kept in float32, as in our
    kernel: the units' own of fewer bits would be faster.
    """
    torch._scaled_mm(
        x.view(torch.float8_e4m3fn),
        weight.view(torch.float8_e4m3fn).t(),
        scale_a=x_scales[:, None],
        scale_b=scales[None, :],
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
        out=out,
    )
