"""FLEX_ATTENTION: `torch.nn.attention.flex_attention` over the packed batch, with a block mask."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kernels.attention.gathered_kv import gather_kv
from kernels.attention_args import AttentionArgs


@functools.cache
def _flex(kind: str) -> Any:
    """Return the function, compiled on a GPU: uncompiled it materializes all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if kind == "cuda" else flex_attention


def paged_attention(args: AttentionArgs) -> Tensor:
    """See `KernelSet.paged_attention`; without sinks and quantized caches."""
    from torch.nn.attention.flex_attention import create_block_mask

    args.check_causal("FLEX_ATTENTION")
    if args.sinks is not None or args.key_scales is not None or args.value_scales is not None:
        raise ValueError("FLEX_ATTENTION does neither sinks nor quantized caches")
    q, window, cap, slopes = args.q, args.sliding_window, args.soft_cap, args.alibi_slopes
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if args.out is None else args.out
    gathered = gather_kv(args)
    if not len(q):
        return out
    options = {"device": q.device, "dtype": torch.int32}
    owner, position = _positions(gathered.queries, gathered.lengths, **options)
    key_owner, key_position = _positions(gathered.lengths, gathered.lengths, **options)

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = key_position[key] - position[query]
        seen = (owner[query] == key_owner[key]) & (distance <= 0)
        return seen & (distance > -window) if window > 0 else seen

    def adjust(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap > 0:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score + slopes[h] * (key_position[key] - position[query])
        return score

    changed = cap > 0 or slopes is not None
    mask = create_block_mask(
        visible, None, None, len(q), len(gathered.keys), device=str(q.device)
    )  # fmt: skip
    result = _flex(q.device.type)(
        q.transpose(0, 1)[None],
        gathered.keys.transpose(0, 1)[None],
        gathered.values.transpose(0, 1)[None],
        score_mod=adjust if changed else None,
        block_mask=mask,
        scale=args.scale,
        enable_gqa=q.shape[1] != args.key_cache.shape[1],
    )
    return out.copy_(result[0].transpose(0, 1))


def _positions(counts: list[int], lengths: list[int], **options: Any) -> tuple[Tensor, Tensor]:
    """Return the sequence and position of the last counts[s] tokens of each sequence s."""
    owner = torch.repeat_interleave(
        torch.arange(len(counts), device=options["device"]),
        torch.tensor(counts, device=options["device"]),
    )
    parts = [torch.arange(n - c, n, **options) for c, n in zip(counts, lengths, strict=True)]
    return owner, torch.cat(parts)
