"""`Heads`: small networks that say, from one hidden state, what the next tokens are."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


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
