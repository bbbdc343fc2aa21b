"""Attention over a paged KV cache, a sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.norm import wide

QUERIES_AT_ONCE = 256
"""Queries of one sequence scored together: bounds the score matrix of a long prompt."""


def gather(cache: Tensor, scales: Tensor | None, blocks: Tensor, low: int, high: int) -> Tensor:
    """The tokens [low, high) of a sequence's `blocks` as [high - low, Hk, D]."""
    block_size = cache.shape[2]
    skipped = low // block_size
    taken = blocks[skipped : -(-high // block_size)].long()
    tokens = wide(cache[taken])
    if scales is not None:
        tokens = tokens * scales[taken][..., None]
    tokens = tokens.transpose(1, 2).flatten(0, 1)
    return tokens[low - skipped * block_size : high - skipped * block_size]


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
    """See `KernelSet.paged_attention`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for index, length in enumerate(lengths):
        begin, end = starts[index], starts[index + 1]
        if begin == end:
            continue
        for low in range(begin, end, QUERIES_AT_ONCE):
            high = min(low + QUERIES_AT_ONCE, end)
            first, last = length - (end - low), length - (end - high)
            # Blocks that have left the window may be anyone's by now.
            seen = max(0, first - sliding_window + 1) if sliding_window > 0 else 0
            keys = gather(key_cache, key_scales, block_tables[index], seen, last)
            values = gather(value_cache, value_scales, block_tables[index], seen, last)
            out[low:high] = attend(
                q[low:high], keys, values, first - seen, scale, sliding_window, soft_cap,
                alibi_slopes, sinks,
            )  # fmt: skip
    return out


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of q [n, Hq, D] over keys and values [L, Hk, D]; q[0] is at their token `first`."""
    count, heads, size = q.shape
    kv_heads = keys.shape[1]
    grouped = wide(q).view(count, kv_heads, heads // kv_heads, size)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at = torch.arange(first, first + count, device=q.device)[:, None]
    distance = torch.arange(keys.shape[0], device=q.device)[None, :] - at
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(scores.dtype).view(kv_heads, -1, 1, 1)
        scores = scores + slopes * distance
    hidden = distance > 0
    if sliding_window > 0:
        hidden = hidden | (distance <= -sliding_window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.einsum("hgqk,khd->qhgd", weights, values).reshape(q.shape).to(q.dtype)
