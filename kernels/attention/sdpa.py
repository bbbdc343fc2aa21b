"""TORCH_SDPA: `torch.nn.functional.scaled_dot_product_attention`, a sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.pages import gather, refuse


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """See `KernelSet.paged_attention`; without soft cap, sinks and quantised caches."""
    refuse("TORCH_SDPA", soft_cap=soft_cap)
    if sinks is not None or key_scales is not None or value_scales is not None:
        raise ValueError("TORCH_SDPA does neither sinks nor quantised caches")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    found = gather(key_cache, value_cache, block_tables, seq_lens, query_start_loc, q.dtype)
    token = key = 0
    for length, count in zip(found.lengths, found.queries, strict=True):
        if count:
            keys, values = found.keys[key : key + length], found.values[key : key + length]
            part = q[token : token + count].transpose(0, 1)
            out[token : token + count] = torch.nn.functional.scaled_dot_product_attention(
                part[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=_bias(count, length, sliding_window, alibi_slopes, q),
                scale=scale,
                enable_gqa=q.shape[1] != keys.shape[1],
            )[0].transpose(0, 1)
        token, key = token + count, key + length
    return out


def _bias(count: int, length: int, window: int, slopes: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to the scores [count, length], or [Hq, count, length]; None for nothing."""
    if count == 1 and slopes is None and not 0 < window < length:
        return None
    position = torch.arange(length - count, length, device=q.device)[:, None]
    distance = torch.arange(length, device=q.device)[None, :] - position
    hidden = distance > 0
    if window > 0:
        hidden = hidden | (distance <= -window)
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
    if slopes is not None:
        bias = (slopes[:, None, None] * distance).to(q.dtype)
    return bias.masked_fill(hidden, float("-inf"))
