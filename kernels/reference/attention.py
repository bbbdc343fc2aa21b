"""Attention over a paged KV cache, sequence by sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_args import AttentionArgs, MlaArgs
from kernels.reference.elementwise import wide

QUERIES_AT_ONCE = 256
"""Queries of a sequence that are processed together, which bounds a long prompt's score matrix."""


def gather(cache: Tensor, scales: Tensor | None, blocks: Tensor, low: int, high: int) -> Tensor:
    """Return the tokens [low, high) of a sequence's `blocks`, [high - low, Hk, D]."""
    block_size = cache.shape[2]
    skipped = low // block_size
    read_blocks = blocks[skipped : -(-high // block_size)].long()
    tokens = wide(cache[read_blocks])
    if scales is not None:
        by_token = scales.dim() > 1
        tokens = tokens * (scales[read_blocks][..., None] if by_token else scales[:, None, None])
    tokens = tokens.transpose(1, 2).flatten(0, 1)
    return tokens[low - skipped * block_size : high - skipped * block_size]


def paged_attention(args: AttentionArgs) -> Tensor:
    """See `KernelSet.paged_attention`."""
    q, window = args.q, args.sliding_window
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if args.out is None else args.out
    starts, lengths = args.query_start_loc.tolist(), args.seq_lens.tolist()
    for index, length in enumerate(lengths):
        begin, end, blocks = starts[index], starts[index + 1], args.block_tables[index]
        if begin == end:
            continue
        for low in range(begin, end, QUERIES_AT_ONCE):
            high = min(low + QUERIES_AT_ONCE, end)
            first, last = length - (end - low), length - (end - high)
            ends = None if args.visible_ends is None else args.visible_ends[low:high]
            if ends is not None:
                last = max(last, int(ends[-1]))
            # Blocks outside the window may have been reused by another sequence.
            seen = max(0, first - window + 1) if window > 0 else 0
            keys = gather(args.key_cache, args.key_scales, blocks, seen, last)
            values = gather(args.value_cache, args.value_scales, blocks, seen, last)
            out[low:high] = attend(q[low:high], keys, values, first - seen, args, seen, ends)
    return out


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    args: AttentionArgs,
    begin: int = 0,
    ends: Tensor | None = None,
) -> Tensor:
    """Compute attention of q [n, Hq, D] over keys and values [L, Hk, D].

    q[0] is at their token `first`, and they start with the sequence's token `begin`. `ends` is a
    part of `AttentionArgs.visible_ends`.
    """
    count, heads, size = q.shape
    kv_heads = keys.shape[1]
    grouped = wide(q).view(count, kv_heads, heads // kv_heads, size)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * args.scale
    if args.soft_cap > 0:
        scores = args.soft_cap * torch.tanh(scores / args.soft_cap)
    positions = torch.arange(first, first + count, device=q.device)[:, None]
    distance = torch.arange(keys.shape[0], device=q.device)[None, :] - positions
    if args.alibi_slopes is not None:
        slopes = args.alibi_slopes.to(scores.dtype).view(kv_heads, -1, 1, 1)
        scores = scores + slopes * distance
    if args.distance_bias is not None:
        distances = (-distance).clamp(0, args.distance_bias.shape[1] - 1)
        bias = args.distance_bias.to(scores.dtype)[:, distances]
        scores = scores + bias.unflatten(0, (kv_heads, -1))
    hidden = distance > 0
    if ends is not None:
        hidden = distance + positions + begin >= ends[:, None]
    if args.sliding_window > 0:
        hidden = hidden | (distance <= -args.sliding_window)
    if args.sparse is not None:
        tokens = begin + torch.arange(keys.shape[0], device=q.device)
        unseen = args.sparse.is_masked(tokens[positions[:, 0]], tokens, heads)
        hidden = hidden | unseen.view(kv_heads, -1, *unseen.shape[1:])
    scores = scores.masked_fill(hidden, float("-inf"))
    if args.sinks is not None:
        sink = args.sinks.to(scores.dtype).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.einsum("hgqk,khd->qhgd", weights, values).reshape(q.shape).to(q.dtype)


def latent_attention(args: MlaArgs) -> Tensor:
    """See `KernelSet.mla_attention`."""
    q, latent = args.q, args.latent
    out = args.new_out() if args.out is None else args.out
    starts, lengths = args.query_start_loc.tolist(), args.seq_lens.tolist()
    for index, length in enumerate(lengths):
        begin, end, blocks = starts[index], starts[index + 1], args.block_tables[index]
        for low in range(begin, end, QUERIES_AT_ONCE):
            high = min(low + QUERIES_AT_ONCE, end)
            first, last = length - (end - low), length - (end - high)
            keys = gather(args.cache, args.scales, blocks, 0, last)[:, 0]
            scores = torch.einsum("qhd,kd->hqk", wide(q[low:high]), keys) * args.scale
            positions = torch.arange(first, last, device=q.device)[:, None]
            later = torch.arange(last, device=q.device)[None, :] > positions
            weights = torch.softmax(scores.masked_fill(later, float("-inf")), -1)
            result = torch.einsum("hqk,kd->qhd", weights, keys[:, -latent:])
            out[low:high] = result.to(q.dtype)
    return out
