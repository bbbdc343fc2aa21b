"""Rotary embedding with optional QK norm, and the write to the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def wide(x: Tensor) -> Tensor:
    """Return `x` in the dtype of sums: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., H] / rms(x) * weight [H], in x's dtype."""
    values = wide(x)
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * inverse * wide(weight)).to(x.dtype)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to residual in place, and return the norm of the sum."""
    residual += x
    return rms_norm(residual, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(first half) * second half of x [T, 2I]."""
    gate, up = wide(x).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return gelu(first half) * second half of x [T, 2I]; approximate is "none" or "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate must be "none" or "tanh", got {approximate!r}')
    gate, up = wide(x).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate=approximate) * up).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, neox: bool) -> Tensor:
    """Rotate x [T, heads, rotary_dim] by cos, sin [T, rotary_dim / 2]."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    if neox:
        first, second = x.chunk(2, dim=-1)
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    neox: bool = True,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """See `KernelSet.rope_and_cache`."""
    for x, norm_weight in ((q, q_norm_weight), (k, k_norm_weight)):
        values = wide(x)
        if norm_weight is not None:
            values = rms_norm(values, norm_weight, eps)
        if cos_sin is not None:
            cos, sin = cos_sin[positions].to(values.dtype).chunk(2, dim=-1)
            width = cos_sin.shape[1]
            turned = rotate(values[..., :width], cos, sin, neox)
            values = torch.cat((turned, values[..., width:]), -1)
        x.copy_(values)
    write_to_cache(k, key_cache, key_scales, slot_mapping)
    write_to_cache(v, value_cache, value_scales, slot_mapping)


def write_to_cache(x: Tensor, cache: Tensor, scales: Tensor | None, slot_mapping: Tensor) -> None:
    """Write k or v [T, Hk, D] to their slots; a slot of -1 writes nothing."""
    stored = slot_mapping >= 0
    slots, x = slot_mapping[stored], x[stored]
    block, offset = slots // cache.shape[2], slots % cache.shape[2]
    if cache.dtype in FP8:
        size = wide(x) if scales is None else wide(x) / scales[:, None]
        limit = torch.finfo(cache.dtype).max
        # torch can't index fp8 tensors.
        cache.view(torch.uint8)[block, :, offset] = (
            size.clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
        )
        return
    if scales is not None:
        scale = wide(x).abs().amax(-1) / 127
        finite = scale.isfinite()
        # Integers can't represent infinity and NaN, so the scale does.
        scales[block, :, offset] = torch.where(finite, scale, torch.nan).to(scales.dtype)
        inverse = 1 / scale
        stored = (finite & inverse.isfinite())[..., None]
        x = torch.where(stored, wide(x) * inverse[..., None], 0.0).round()
    cache[block, :, offset] = x.to(cache.dtype)
