"""RMS norms, a row a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import describe, norm_width
from kernels.triton.launch import launch

MOST_COLUMNS = 1 << 16


@triton.jit
def rms_norm_kernel(
    out, x, residual, weight, x_stride, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). With ADD, residual becomes x + residual, rounded to its dtype, first."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < WIDTH
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row * WIDTH + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    scaled = values * inverse * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `KernelSet.rms_norm`."""
    width = norm_width(x, weight)
    rows = x.reshape(-1, width)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, rows, None, weight, eps)
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `KernelSet.fused_add_rms_norm`."""
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(f"x {describe(x)} and residual {describe(residual)} differ")
    if not residual.is_contiguous():
        raise ValueError("residual must be contiguous")
    norm_width(x, weight)
    out = torch.empty_like(residual)
    _launch(out, x.contiguous(), residual, weight, eps)
    return out


def _launch(out: Tensor, rows: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> None:
    width = weight.shape[0]
    if width > MOST_COLUMNS:
        raise ValueError(f"a norm over {width} values isn't supported: at most {MOST_COLUMNS}")
    padded = triton.next_power_of_2(width)
    launch(
        rms_norm_kernel, (out.numel() // width,), out, rows, residual, weight,
        rows.view(-1, width).stride(0) if rows.dim() != 2 else rows.stride(0), eps,
        WIDTH=width, PADDED=padded, ADD=residual is not None,
        num_warps=min(16, max(1, padded // 512)),
    )  # fmt: skip
