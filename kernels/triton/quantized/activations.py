"""Rounding of activations to eight bits, with scales computed in each step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.fp8 import encode_fp8, round_half_even
from kernels.triton.launch import INTERPRETED, Target, launch

# With this many rows a product is limited by the matrix units, which the library keeps busy with
# asynchronous copies and warp specialization. Fewer rows only wait for the weights, and our kernel
# reads those as fast.

MANY_ROWS = 256
"""Minimum rows for the library's product: a guess until it is measured.

Each byte of the weights takes 2 * rows operations. Below (operations per second) / (bytes per
second) / 2 rows any kernel waits for the weights: 206 rows on an H200, 281 on a B200, 295 on an
H100, by their makers' figures. Above that the matrix units are the limit.
"""
CAPABILITIES = (90, 100, 103)
"""Compute capabilities, times ten, for which torch has products with a scale per row and per
column.
"""
_MULTIPLE = 16
"""Both dimensions of the weights must be multiples of this."""


def library_multiplies(rows: int, weight: Tensor, dtype: torch.dtype, target: Target) -> bool:
    """Return whether torch has the product of this many rows with `weight` [N, K], in `dtype`."""
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

    x uint8 [M, K] and weight uint8 [N, K] are e4m3 bits. Sums are float32, as in our kernel; the
    matrix units' own less precise sums would be faster.
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


VALUES_AT_ONCE = 1024
BLOCK = 64 if INTERPRETED else 2048
E4M3_MAX = 448.0


@triton.jit
def round_groups_kernel(
    out, scales, x, stride, width, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Round each group of a row to int8 with a float32 scale. Grid (rows, blocks of groups)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    lanes = tl.arange(0, PADDED)
    columns = group[:, None] * GROUP + lanes[None, :]
    inside = (group < GROUPS)[:, None] & (lanes < GROUP)[None, :]
    values = tl.load(x + row * stride + columns, mask=inside & (columns < width), other=0.0).to(
        tl.float32
    )
    scale = tl.max(tl.abs(values), 1) / 127.0
    inverse = tl.where(scale > 0, 1.0 / tl.maximum(scale, 1e-38), 0.0)
    values = (values * inverse[:, None]).to(tl.float32)
    integers = round_half_even(tl.minimum(tl.maximum(values, -127.0), 127.0))
    tl.store(out + row * (GROUPS * GROUP) + columns, integers.to(tl.int8), mask=inside)
    # Rows that aren't finite must stay so, which integers can't represent.
    broken = tl.max((values != values).to(tl.int32), 1) > 0
    scale = tl.where(broken, float("nan"), scale)
    tl.store(scales + row * GROUPS + group, scale, mask=group < GROUPS)


@triton.jit
def round_rows_kernel(out, scales, x, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Round each row to e4m3 bits with a float32 scale. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, WIDTH, BLOCK):
        columns = start + lanes
        values = tl.load(x + row * stride + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        broken += (values != values).to(tl.int32)
        largest = tl.maximum(largest, tl.abs(values))
    scale = tl.max(largest, 0) / 448.0
    inverse = tl.where(scale > 0, 1.0 / tl.maximum(scale, 1e-38), 0.0)
    for start in tl.range(0, WIDTH, BLOCK):
        columns = start + lanes
        values = tl.load(x + row * stride + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        bits = encode_fp8((values * inverse).to(tl.float32), 1)
        tl.store(out + row * WIDTH + columns, bits, mask=columns < WIDTH)
    tl.store(scales + row, tl.where(tl.sum(broken, 0) > 0, float("nan"), scale))


def round_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [M, K] -> int8 [M, groups * group] and float32 scales [M, groups]."""
    rows, width = x.shape
    groups = triton.cdiv(width, group)
    out = torch.empty((rows, groups * group), dtype=torch.int8, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(group)
    at_once = min(triton.next_power_of_2(groups), max(1, VALUES_AT_ONCE // padded))
    launch(
        round_groups_kernel, (rows, triton.cdiv(groups, at_once)), out, scales, x, x.stride(0),
        width, GROUPS=groups, GROUP=group, PADDED=padded, AT_ONCE=at_once, num_warps=4,
    )  # fmt: skip
    return out, scales


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> e4m3 bits uint8 [M, K] and float32 scales [M]."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    launch(
        round_rows_kernel, (rows,), out, scales, x, x.stride(0), WIDTH=width, BLOCK=block,
        num_warps=8 if block >= 1024 else 4,
    )  # fmt: skip
    return out, scales
