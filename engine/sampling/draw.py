"""Inverse-CDF sampling over weights in vocabulary order.

Vocabulary order, because then a small change of the logits moves borders a little, while in order
of probability it would swap neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
#: The token of a row that nothing can be drawn from.
BROKEN = -1


def _below(total: Tensor, uniform: Tensor) -> Tensor:
    """`uniform * total`, kept under `total` whatever rounding does."""
    return torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))


def draw_small(weights: Tensor, uniform: Tensor) -> Tensor:
    """Indices drawn from few weights a row.

    Args:
        weights: [n, k] float64, not negative.
        uniform: [n] float64 in [0, 1).

    Returns:
        [n] int64; an index whose weight is positive wherever a row has one.
    """
    cumulative = weights.cumsum(dim=-1)
    target = _below(cumulative[:, -1], uniform)
    return (cumulative <= target[:, None]).sum(dim=-1).clamp_(max=weights.shape[-1] - 1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Tokens drawn from whole rows, in two levels: a block, then a token within it.

    Args:
        weights: [n, vocab] float32, not negative; they needn't add up to 1.
        uniform: [n] float64 in [0, 1).

    Returns:
        [n] int64; `BROKEN` where a row's weights add up to nothing, infinity or NaN.
    """
    vocab = weights.shape[-1]
    whole = vocab // BLOCK * BLOCK
    sums = weights[:, whole:].sum(dim=-1, keepdim=True)
    if whole:
        blocks = weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(dim=-1)
        sums = torch.cat((blocks, sums), dim=-1)
    sums = sums.double()
    cumulative = sums.cumsum(dim=-1)
    total = cumulative[:, -1]
    target = _below(total, uniform)
    block = (cumulative <= target[:, None]).sum(dim=-1).clamp_(max=sums.shape[-1] - 1)
    before = (cumulative - sums).gather(1, block[:, None]).squeeze(-1)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=vocab - 1)).double()
    inside = torch.where(ids < vocab, inside, 0.0).cumsum(dim=-1)
    end = inside[:, -1]
    rest = torch.minimum(target - before, torch.nextafter(end, torch.zeros_like(end)))
    place = (inside <= rest[:, None]).sum(dim=-1).clamp_(max=BLOCK - 1)
    tokens = block * BLOCK + place
    return torch.where((total > 0) & torch.isfinite(total), tokens, BROKEN)
