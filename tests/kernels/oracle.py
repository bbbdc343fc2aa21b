"""Float64 versions of the kernels, written for plainness: a loop wherever a loop is clearest."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from kernels.attention_args import AttentionArgs, BlockSparse


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One row at a time."""
    rows = [row / math.sqrt(float((row * row).mean()) + eps) for row in x.double()]
    return torch.stack(rows) * weight.double() if rows else x.double()


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, neox: bool) -> Tensor:
    """Pairs of x [T, heads, D] as complex numbers, turned by cos + i sin."""
    cos, sin = cos_sin.double()[positions].chunk(2, -1)
    half = cos.shape[1]
    index = torch.arange(half)
    a, b = (index, index + half) if neox else (2 * index, 2 * index + 1)
    out = x.double().clone()
    turned = torch.complex(out[..., a], out[..., b]) * torch.complex(cos, sin)[:, None]
    out[..., a], out[..., b] = turned.real, turned.imag
    return out


def unseen(sparse: BlockSparse, position: int, logits: Tensor) -> Tensor:
    """Of logits [heads, keys], the last of which is the query's own."""
    heads, count = logits.shape
    first = position + 1 - count
    rows = [
        [
            position // sparse.block - (first + k) // sparse.block >= sparse.local
            and ((first + k) // sparse.block + h * sparse.head_step + 1) % sparse.stride > 0
            for k in range(count)
        ]
        for h in range(heads)
    ]
    return torch.tensor(rows)


def _content(value: Any) -> Hashable:
    """What tells one argument from another: of a tensor its bytes, whatever they stand for."""
    if not isinstance(value, Tensor):
        return value
    content = value.flatten().view(torch.uint8).numpy()
    return value.dtype, value.shape, hashlib.blake2b(content).digest()


def _cached_last(
    attention: Callable[[AttentionArgs], Tensor],
) -> Callable[[AttentionArgs], Tensor]:
    """The same of equal arguments: each implementation, with each number of threads, is asked what
    the others were, and to work it out by loops takes longer than all of them."""
    last: dict[Hashable, Tensor] = {}

    @functools.wraps(attention)
    def asked(args: AttentionArgs) -> Tensor:
        content = tuple(
            _content(getattr(args, part.name))
            for part in dataclasses.fields(args)
            if part.name != "out"
        )
        output = last.pop(content, None)
        last[content] = attention(args) if output is None else output
        if len(last) > MAX_CACHED:
            del last[next(iter(last))]
        return last[content].clone()

    return asked


MAX_CACHED = 200


@_cached_last
def paged_attention(args: AttentionArgs) -> Tensor:
    """One query at a time, its keys and values gathered and repeated for each head."""
    out = torch.zeros(args.q.shape, dtype=torch.float64)
    block_size, group = args.key_cache.shape[2], args.q.shape[1] // args.key_cache.shape[1]
    for s, length in enumerate(args.seq_lens.tolist()):
        begin, end = args.query_start_loc[s : s + 2].tolist()
        for t in range(begin, end):
            position = length - (end - t)
            low = max(0, position - args.sliding_window + 1) if args.sliding_window else 0
            after = position + 1 if args.visible_ends is None else int(args.visible_ends[t])
            seen = torch.arange(low, after)
            blocks, offsets = args.block_tables[s, seen // block_size].long(), seen % block_size
            keys = args.key_cache[blocks, :, offsets].double().repeat_interleave(group, 1)
            values = args.value_cache[blocks, :, offsets].double().repeat_interleave(group, 1)
            logits = torch.einsum("hd,khd->hk", args.q[t].double(), keys) * args.scale
            if args.soft_cap:
                logits = args.soft_cap * torch.tanh(logits / args.soft_cap)
            if args.alibi_slopes is not None:
                logits = logits + args.alibi_slopes.double()[:, None] * (seen - position)
            if (bias := args.distance_bias) is not None:
                logits = logits + bias.double()[:, (position - seen).clamp(0, bias.shape[1] - 1)]
            if args.sparse is not None:
                logits = logits.masked_fill(unseen(args.sparse, position, logits), float("-inf"))
            if args.sinks is not None:
                logits = torch.cat((logits, args.sinks.double()[:, None]), 1)
            weights = torch.softmax(logits, 1)[:, : len(seen)]
            out[t] = torch.einsum("hk,khd->hd", weights, values)
    return out
