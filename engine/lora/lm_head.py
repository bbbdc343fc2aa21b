"""The output layer of an adapter that adds tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import LinearLayer


class LMHeadWithAddedTokens(LinearLayer):
    """An output layer followed by an adapter's rows.

    Tokens without a row in either can be in prompts but never be generated: their logits are -inf.
    """

    def __init__(self, first: LinearLayer, more: LinearLayer | None, out_features: int) -> None:
        """`more`: rows after those of `first`. `out_features`: number of all tokens."""
        self._first, self._more = first, more
        self.in_features, self.out_features = first.in_features, out_features
        self.nbytes = first.nbytes + (0 if more is None else more.nbytes)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        parts = [self._first(x)]
        if self._more is not None:
            parts.append(self._more(x))
        missing = self.out_features - sum(part.shape[1] for part in parts)
        parts.append(parts[0].new_full((len(x), missing), -torch.inf))
        logits = torch.cat(parts, dim=1)
        return logits if out is None else out.copy_(logits)

    def rows(self, ids: Tensor) -> Tensor:
        count = self._first.out_features
        if self._more is None or not bool((ids >= count).any()):
            return self._first.rows(ids)
        rows = self._first.rows(ids.clamp(max=count - 1))
        is_added = ids >= count
        rows[is_added] = self._more.rows(ids[is_added] - count).to(rows.dtype)
        return rows
