"""Pooling over a prompt that may come in chunks: what is kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.contract.pooling_params import PoolingParams


@dataclass(slots=True)
class PoolingState:
    """One sequence's hidden states so far, as far as its pooling needs them.

    Attributes:
        pooling_type: "CLS", "LAST" or "MEAN"; without meaning when `params.by_token`.
        count: tokens seen.
    """

    params: PoolingParams
    pooling_type: str
    count: int = 0
    _kept: list[Tensor] = field(default_factory=list)

    @property
    def needs_all(self) -> bool:
        """Whether it must see every token's hidden state, not the last one's alone."""
        return self.params.by_token or self.pooling_type != "LAST"

    def add(self, hidden: Tensor) -> None:
        """Take in the hidden states [n, hidden] of the next n tokens (with LAST: of the last)."""
        if self.params.by_token:
            self._kept.append(hidden)
        elif self.pooling_type == "MEAN":
            # In float64: the sum must not depend on how the prompt was cut.
            total = hidden.sum(dim=0, dtype=torch.float64)
            self._kept = [self._kept[0] + total if self._kept else total]
        elif self.pooling_type == "LAST":
            self._kept = [hidden[-1]]
        elif self.count == 0:
            self._kept = [hidden[0].clone()]
        self.count += len(hidden)

    def result(self) -> Tensor:
        """float32 [1, hidden], or [num_tokens, hidden] for tasks by token."""
        if self.params.by_token:
            return torch.cat(self._kept).float()
        (pooled,) = self._kept
        if self.pooling_type == "MEAN":
            pooled = pooled / self.count
        return pooled.float()[None]
