"""Attention in both directions over sequences of many lengths, without padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.models.norms import Transform
from engine.sampling.transfer import to_device


class Sequences:
    """The sequences of one step, sorted by length: those of one length are one dense batch.

    Args:
        query_start_loc: int32 [num_seqs + 1], on the host, where each sequence's tokens begin.
        device: of what is to be sorted.

    Attributes:
        groups: (length, first token, end) of the sequences of each length, after sorting.
    """

    def __init__(self, query_start_loc: Tensor, device: torch.device) -> None:
        self._device, starts = device, query_start_loc.tolist()
        by_length: dict[int, list[int]] = {}
        for start, end in pairwise(starts):
            by_length.setdefault(end - start, []).append(start)
        self.groups: list[tuple[int, int, int]] = []
        places, first = [], 0
        for length, begins in sorted(by_length.items()):
            places.append((torch.tensor(begins)[:, None] + torch.arange(length)).flatten())
            self.groups.append((length, first, first + length * len(begins)))
            first += length * len(begins)
        # Of one length they lie as they are needed.
        self._order = to_device(torch.cat(places), device) if len(places) > 1 else None

    def sorted(self, values: Tensor) -> Tensor:
        """[num_tokens, ...] in the order of the groups."""
        return values if self._order is None else values[self._order]

    def places(self, count: int) -> Tensor:
        """int64 [count]: where each of the step's tokens stands among the sorted ones."""
        return self.restored(torch.arange(count, device=self._device))

    def restored(self, values: Tensor) -> Tensor:
        """What was sorted, in the step's order again."""
        if self._order is None:
            return values
        return torch.empty_like(values).index_copy_(0, self._order, values)


@dataclass(slots=True, kw_only=True)
class BidirectionalAttention:
    """One layer's attention: every token sees its whole sequence, or what is near.

    Attributes:
        project: hidden states to queries, keys and values side by side: [T, 3 q].
        output: what follows attention: [T, q] -> [T, hidden].
        cos_sin: rotary table float32 [max_position, head_dim], None: no rotation.
        reach: tokens at most this far away are seen, 0 for all.
        bias_table: float32 [buckets, heads], biases by relative position, or None.
    """

    project: Transform
    output: Transform
    num_heads: int
    head_dim: int
    cos_sin: Tensor | None = None
    reach: int = 0
    bias_table: Tensor | None = None

    def __call__(self, x: Tensor, positions: Tensor, sequences: Sequences) -> Tensor:
        """[T, hidden] of the same; tokens are sorted as in `sequences`."""
        qkv = self.project(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        if self.cos_sin is not None:
            rotated = _rotated(qkv[:, :2], self.cos_sin[positions]).to(qkv.dtype)
            qkv = torch.cat((rotated, qkv[:, 2:]), dim=1)
        out = [
            self._attend(qkv[first:end].unflatten(0, (-1, length)), length)
            for length, first, end in sequences.groups
        ]
        return self.output((torch.cat(out) if len(out) > 1 else out[0]).flatten(1))

    def _attend(self, qkv: Tensor, length: int) -> Tensor:
        """[n, L, 3, heads, head_dim] -> [n * L, heads, head_dim]."""
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mask = self._mask(length, q)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, length: int, like: Tensor) -> Tensor | None:
        """What is added to the scores, or which pairs count: [L, L] or [heads, L, L]."""
        if self.bias_table is None and (not self.reach or length <= self.reach + 1):
            return None
        place = torch.arange(length, device=like.device)
        distance = place[None, :] - place[:, None]
        if self.bias_table is not None:
            buckets = relative_bucket(distance, len(self.bias_table))
            return self.bias_table[buckets].movedim(-1, 0).to(like.dtype)
        return distance.abs() <= self.reach


def relative_bucket(distance: Tensor, buckets: int, farthest: int = 128) -> Tensor:
    """T5's buckets of key minus query position (arXiv 1910.10683): exact near, logarithmic far."""
    half = buckets // 2
    exact = half // 2
    away = distance.abs()
    far = exact + (
        torch.log(away.clamp(min=1).float() / exact) / math.log(farthest / exact) * (half - exact)
    ).long().clamp(max=half - exact - 1)
    return torch.where(away < exact, away, far) + half * (distance > 0)


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, 2, heads, D] rotated as two halves by cos_sin [T, D]."""
    cos, sin = cos_sin[:, None, None, :].chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
