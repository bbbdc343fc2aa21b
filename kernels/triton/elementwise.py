"""Gated activations and RMS norms."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tensors import describe, norm_width
from kernels.triton.launch import launch

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
COLUMNS = 1024


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Activate float32: 0 SiLU, 1 GELU, 2 its tanh approximation (Hendrycks and Gimpel 2016)."""
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh by exp(-2 |x|), which can't overflow.
        decay = tl.exp(-2.0 * tl.abs(inner))
        tanh = (1.0 - decay) / (1.0 + decay)
        return 0.5 * x * (1.0 + tl.where(inner < 0, -tanh, tanh))


@triton.jit
def gate_kernel(out, x, stride, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    value = activate(gate, KIND) * up
    tl.store(out + row * WIDTH + columns, value.to(out.dtype.element_ty), mask=inside)


def gate_and_mul(x: Tensor, activation: str) -> Tensor:
    """x [T, 2I] -> activation(first half) * second half, with "silu", "gelu" or "gelu_tanh"."""
    if activation not in KINDS:
        raise ValueError(f"the activation must be one of {', '.join(KINDS)}, got {activation!r}")
    rows, width = x.shape
    if width % 2:
        raise ValueError(f"x {describe(x)} has no two halves")
    if x.stride(1) != 1:
        x = x.contiguous()
    half = width // 2
    out = torch.empty((rows, half), dtype=x.dtype, device=x.device)
    block = min(COLUMNS, triton.next_power_of_2(max(1, half)))
    launch(
        gate_kernel, (rows, triton.cdiv(half, block)), out, x, x.stride(0), WIDTH=half,
        KIND=KINDS[activation], BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """See `KernelSet.silu_and_mul`."""
    return gate_and_mul(x, "silu")


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See `KernelSet.gelu_and_mul`."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate must be "none" or "tanh", got {approximate!r}')
    return gate_and_mul(x, "gelu" if approximate == "none" else "gelu_tanh")


MAX_COLUMNS = 1 << 16


@triton.jit
def rms_norm_kernel(
    out, x, residual, weight, x_stride, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """RMS norm, grid (rows,). With ADD, residual first becomes x + residual in its dtype."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    inside = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row * WIDTH + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    scaled = values * inverse * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, scaled.to(out.dtype.element_ty), mask=inside)


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
    if width > MAX_COLUMNS:
        raise ValueError(f"a norm over {width} values isn't supported: at most {MAX_COLUMNS}")
    padded = triton.next_power_of_2(width)
    launch(
        rms_norm_kernel, (out.numel() // width,), out, rows, residual, weight,
        rows.view(-1, width).stride(0) if rows.dim() != 2 else rows.stride(0), eps,
        WIDTH=width, PADDED=padded, ADD=residual is not None,
        num_warps=min(16, max(1, padded // 512)),
    )  # fmt: skip
