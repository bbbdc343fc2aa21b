"""Sampling by sorting whole rows."""

from __future__ import annotations

import torch
from torch import Tensor

BROKEN = -1
#: Maximum number of logits that are sorted at once: about 64 bytes of intermediate tensors each.
_SORTED_AT_ONCE = 1 << 22


def argmax(logits: Tensor) -> Tensor:
    """See `KernelSet.argmax`."""
    top = logits.amax(-1, keepdim=True)
    # torch.argmax doesn't define which of several equal values it returns.
    first = (logits == top).int().argmax(-1)
    return torch.where(torch.isfinite(top.squeeze(-1)), first, BROKEN)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """See `KernelSet.sample`."""
    if not logits.numel():
        return torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    rows = max(1, _SORTED_AT_ONCE // logits.shape[1])
    if len(logits) > rows:
        arguments = (logits, temperature, top_k, top_p, min_p, uniforms)
        parts = zip(*(values.split(rows) for values in arguments), strict=True)
        return torch.cat([sample(*part) for part in parts])
    greedy = argmax(logits)
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    values = values.double()
    scale = torch.where(temperature > 0, temperature, 1.0).double()[:, None]
    weights = ((values - values[:, :1]) / scale).exp()
    order = torch.arange(logits.shape[1], device=logits.device)
    weights *= (order < top_k.clamp(min=1)[:, None]) & (weights >= min_p[:, None])
    preceding = weights.cumsum(-1) - weights
    inside = (preceding < (top_p * weights.sum(-1))[:, None]) | (top_p >= 1)[:, None]
    inside[:, 0] = True
    by_id = torch.zeros_like(weights).scatter_(1, ids, weights * inside)
    cumulative = by_id.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = (cumulative <= target[:, None]).sum(-1).clamp(max=logits.shape[1] - 1)
    return torch.where((greedy >= 0) & (temperature > 0), drawn, greedy)
