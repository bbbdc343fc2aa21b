"""Lists of (row, token) pairs as index tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.sampling.transfer import to_device


class Pairs:
    """Places in a [rows, vocab] tensor, collected in Python and used as one index.

    Args:
        vocab_size: tokens outside [0, vocab_size) are dropped: an index out of range on a GPU would
            end every sequence's run, not one's.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[int] = []
        self._tokens: list[int] = []

    def add(self, row: int, tokens: Iterable[int]) -> list[int]:
        """Add a row's tokens; returns those that were kept."""
        kept = [token for token in tokens if 0 <= token < self._vocab_size]
        self._rows += [row] * len(kept)
        self._tokens += kept
        return kept

    def __len__(self) -> int:
        return len(self._rows)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """([n] rows, [n] tokens), int64."""
        return (
            to_device(torch.tensor(self._rows, dtype=torch.int64), device),
            to_device(torch.tensor(self._tokens, dtype=torch.int64), device),
        )
