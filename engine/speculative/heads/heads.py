"""`Heads`: small networks that say, from one hidden state, what the next tokens are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from kernels import LinearLayer


def fed(layer: LinearLayer, x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 of a linear layer that is best given `dtype`."""
    return layer(x.to(dtype)).float()


class Heads(ABC):
    """Weights in their device's layout.

    Attributes:
        most: drafts of a sequence.
        nbytes: of the weights.
    """

    most: int
    nbytes: int

    @abstractmethod
    def start(self, hidden: Tensor) -> Tensor:
        """[n, any] of float32 [n, hidden], the states that the newest tokens were drawn from."""

    @abstractmethod
    def logits(self, depth: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [n, vocab] of the draft number `depth`, from 0, and the next one's state.

        `state` is that of the draft before (a selection of its rows), or what `start` gave;
        `tokens` int64 [n]: the newest token of each row, drafts included.
        """


class Rounds(Protocol):
    """What heads say of some rows, one draft behind the other."""

    def logits(self, tokens: Tensor) -> Tensor:
        """float32 [n, vocab] of each row's next draft, behind its newest token, int64 [n]."""

    def keep(self, rows: list[int]) -> None:
        """Go on with these of the rows alone."""


class HeadRounds:
    """Of `Heads`, which read nothing but the state that they begin with."""

    def __init__(self, heads: Heads, hidden: Tensor) -> None:
        """`hidden`: float32 [n, hidden], from which the newest tokens were drawn."""
        self._heads, self._state, self._depth = heads, heads.start(hidden), 0

    def logits(self, tokens: Tensor) -> Tensor:
        """See `Rounds`."""
        found, self._state = self._heads.logits(self._depth, self._state, tokens)
        self._depth += 1
        return found

    def keep(self, rows: list[int]) -> None:
        """See `Rounds`."""
        self._state = self._state[rows]
