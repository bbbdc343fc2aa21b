"""The interface of kernels that change logits in place before a token is chosen.

R is the number of rows; logits are float32 [R, vocab], contiguous. Row numbers and ids must lie
within the logits; they aren't checked, since that would wait for a GPU. Nothing here waits for the
device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class TopLogprobs(NamedTuple):
    """Log probabilities of a row's chosen token and of its k most likely tokens, best first.

    Attributes:
        ids: int64 [R, 1 + k], the chosen token first.
        values: float32 [R, 1 + k]; all NaN in a row whose largest logit isn't finite, or that
            contains NaN.
        ranks: int64 [R, 1 + k]; 1 is the most likely; equal logits share the best rank.
        normalizers: float32 [R], each row's logsumexp; NaN as in `values`.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor
    normalizers: Tensor


@dataclass(slots=True)
class TokenTable:
    """The distinct tokens of sequences, which stay on the device between steps.

    Attributes:
        ids: int32 [slots, capacity].
        counts: int32 [slots, capacity], how often each occurs in the output; 0 if only in the
            prompt.
    """

    ids: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The rows to penalize, their slots in a `TokenTable` and their penalties.

    Attributes:
        rows, slots: int32 [n].
        repetition, frequency, presence: float32 [n], as defined by CTRL (Keskar et al. 2019) and
            OpenAI.
    """

    rows: Tensor
    slots: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


class LogitEdits(ABC):
    """An implementation of the edits."""

    @abstractmethod
    def mask_tokens(self, logits: Tensor, rows: Tensor, ids: Tensor) -> None:
        """Set n logits to -inf, rows and ids int64 [n]; duplicates are allowed."""

    @abstractmethod
    def add_bias(self, logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
        """Add values float32 [n] to n logits, rows and ids int64 [n], without duplicates."""

    @abstractmethod
    def apply_bitmask(
        self, logits: Tensor, rows: Tensor, bits: Tensor, forced: Tensor | None
    ) -> None:
        """Set the logits of some rows to -inf unless the token's bit is set.

        rows int64 [n], without duplicates; bits int32 [n, words]: bit t % 32 of word t // 32 is
        token t's, for at least the whole vocabulary. If forced bool [n] is set, the logits of
        allowed tokens become 0.
        """

    @abstractmethod
    def update_token_table(self, table: TokenTable, changes: Tensor) -> None:
        """Write changes int32 [4, m] to a table: slots, indices, ids and counts; no entry twice."""

    @abstractmethod
    def apply_penalties(
        self, logits: Tensor, penalized: PenaltyRows, table: TokenTable, lengths: Tensor
    ) -> None:
        """Penalize the first lengths int32 [n] tokens of each row's slot."""

    @abstractmethod
    def token_logprobs(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log probabilities, normalizers and ranks of tokens int64 [R].

        float32 [R], float32 [R] (each row's logsumexp) and int64 [R] (1 is the most likely; equal
        logits share the best rank).
        """
