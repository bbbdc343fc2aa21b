"""Exact top-k and top-p over whole rows without sorting them.

The float's bits, made to order like an integer, are looked at from the top, eleven at a time: each
histogram narrows down where the border lies, the last one to a single value. Three passes, where a
sort of 32,000 logits takes many times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: (bits below, number of buckets) of each pass over 32-bit keys.
_PASSES = ((21, 1 << 11), (10, 1 << 11), (0, 1 << 10))
#: Entries that are worked on at once: what is made of them stays in a CPU's cache.
_CHUNK = 1 << 18


def rows_at_once(vocab_size: int) -> int:
    """How many rows to work on at once."""
    return max(1, _CHUNK // max(vocab_size, _PASSES[0][1]))


def ordered_keys(values: Tensor) -> Tensor:
    """int64 keys in [0, 2**32) that order as `values` ([n, vocab], float32) do; -0 equals 0."""
    bits = (values + 0.0).contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + (1 << 31)


@dataclass(slots=True)
class Border:
    """Where a prefix of a row, ordered by (key downwards, id upwards), ends.

    Attributes:
        key: [n], the last key in it.
        above: [n] float64, the weight of all larger keys.
    """

    key: Tensor
    above: Tensor


def _narrow(
    digits: Tensor, weights: Tensor, target: Tensor, above: Tensor, buckets: int
) -> tuple[Tensor, Tensor]:
    """The digit at which the weight, summed from the top, reaches `target`, and the sum before."""
    rows = digits.shape[0]
    offset = torch.arange(rows, device=digits.device)[:, None] * buckets
    flat = torch.bincount((digits + offset).flatten(), weights.flatten(), rows * buckets)
    histogram = flat.view(rows, buckets).flip(-1)
    reached = histogram.cumsum(dim=-1) + above[:, None]
    place = (reached < target[:, None]).sum(dim=-1, keepdim=True).clamp_(max=buckets - 1)
    before = reached.gather(1, (place - 1).clamp(min=0)).squeeze(-1)
    place = place.squeeze(-1)
    return buckets - 1 - place, torch.where(place > 0, before, above)


def find_border(keys: Tensor, weights: Tensor, target: Tensor) -> Border:
    """The shortest prefix whose weight reaches `target`.

    Args:
        keys: [n, vocab] from `ordered_keys`.
        weights: [n, vocab] float64, not negative.
        target: [n] float64, positive.
    """
    found = torch.zeros_like(target, dtype=torch.int64)
    above = torch.zeros_like(target)
    for shift, buckets in _PASSES:
        digits = (keys >> shift) & (buckets - 1)
        digit, above = _narrow(digits, weights, target, above, buckets)
        found |= digit << shift
        if shift:
            weights = torch.where((keys >> shift) == (found >> shift)[:, None], weights, 0.0)
    return Border(found, above)


def keep_prefix(keys: Tensor, border: Border, ties: Tensor) -> Tensor:
    """[n, vocab] bool: keys above the border, and the first `ties` ([n]) by id of those on it."""
    on_it = keys == border.key[:, None]
    return (keys > border.key[:, None]) | (on_it & (on_it.cumsum(dim=-1) <= ties[:, None]))
