"""TORCH_SDPA: `torch.nn.functional.scaled_dot_product_attention`, a sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.gathered_kv import gather_kv, raise_unsupported
from kernels.attention_args import AttentionArgs


def paged_attention(args: AttentionArgs) -> Tensor:
    """See `KernelSet.paged_attention`; without soft cap, sinks and quantized caches."""
    raise_unsupported("TORCH_SDPA", soft_cap=args.soft_cap)
    args.check_causal("TORCH_SDPA")
    if args.sinks is not None or args.key_scales is not None or args.value_scales is not None:
        raise ValueError("TORCH_SDPA does neither sinks nor quantized caches")
    q, gathered = args.q, gather_kv(args)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if args.out is None else args.out
    token = key = 0
    for length, count in zip(gathered.lengths, gathered.queries, strict=True):
        if count:
            keys, values = gathered.keys[key : key + length], gathered.values[key : key + length]
            part = q[token : token + count].transpose(0, 1)
            out[token : token + count] = torch.nn.functional.scaled_dot_product_attention(
                part[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=_bias(count, length, args),
                scale=args.scale,
                enable_gqa=q.shape[1] != keys.shape[1],
            )[0].transpose(0, 1)
        token, key = token + count, key + length
    return out


def _bias(count: int, length: int, args: AttentionArgs) -> Tensor | None:
    """Return the scores' bias [count, length] or [Hq, count, length]; None without bias."""
    q, window, slopes = args.q, args.sliding_window, args.alibi_slopes
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
