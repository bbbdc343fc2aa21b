"""From a model's mask to the sliding window that the paged kernels know."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def window_of(mask: MaskFunction, length: int) -> int:
    """The window (a token itself included) that a mask function leaves open, 0 for all before.

    The function is asked for whole rows of a context of `length` tokens, so that a window (or a
    chunk) that no context outgrows is full attention. Raises ValueError for a mask that is neither
    causal attention nor a sliding window.
    """
    last = _row(mask, length - 1, length)
    window = int(last.sum())
    for query in sorted({0, 1, length // 3, length // 2, length - 2, length - 1}):
        if not 0 <= query < length:
            continue
        keys = torch.arange(length)
        wanted = (keys <= query) & (keys > query - window)
        if not torch.equal(_row(mask, query, length), wanted):
            raise ValueError("its attention mask is neither causal nor a sliding window")
    return 0 if window == length else window


def _row(mask: MaskFunction, query: int, length: int) -> Tensor:
    """bool [length]: which keys a query sees."""
    zero, keys = torch.tensor(0), torch.arange(length)
    return torch.as_tensor(mask(zero, zero, torch.tensor(query), keys)).expand(length)
