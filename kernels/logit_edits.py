"""The contract of kernels that change logits in place before a token is chosen.

R is the number of rows, logits are float32 [R, vocab], contiguous. Which rows and ids are named
can't be checked without waiting for a GPU: each must lie within the logits. Nothing here waits for
the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class TopLogprobs(NamedTuple):
    """Log probabilities of a row's chosen token and of its k likeliest, best first.

    Attributes:
        ids: int64 [R, 1 + k], the chosen token first.
        values: float32 [R, 1 + k]; NaN throughout a row whose largest logit isn't finite, or that
            has a NaN.
        ranks: int64 [R, 1 + k]; 1: the likeliest; equal logits share the best rank.
        normalizers: float32 [R], each row's logsumexp; NaN as in `values`.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor
    normalizers: Tensor


@dataclass(slots=True)
class TokenTable:
    """Distinct tokens of some sequences, kept on the device from step to step.

    Attributes:
        ids: int32 [slots, capacity].
        counts: int32 [slots, capacity], how often each is in the output; 0: only in the prompt.
    """

    ids: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Which rows are penalised, by which slots of a `TokenTable` and how.

    Attributes:
        rows, slots: int32 [n].
        repetition, frequency, presence: float32 [n], as OpenAI and CTRL (Keskar et al. 2019)
            define them.
    """

    rows: Tensor
    slots: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


class LogitEdits(ABC):
    """One implementation of the edits."""

    @abstractmethod
    def mask_tokens(self, logits: Tensor, rows: Tensor, ids: Tensor) -> None:
        """-inf at n places, rows and ids int64 [n]; a place may be named more than once."""

    @abstractmethod
    def add_bias(self, logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
        """Add values float32 [n] at n places, rows and ids int64 [n], each named once."""

    @abstractmethod
    def apply_bitmask(
        self, logits: Tensor, rows: Tensor, bits: Tensor, forced: Tensor | None
    ) -> None:
        """-inf for all tokens of some rows but those whose bit is set.

        rows int64 [n], different ones; bits int32 [n, words]: bit t % 32 of word t // 32 is token
        t's, at least as many as the vocabulary has tokens. Where forced bool [n] is set, the
        tokens that are kept become 0, whatever they were.
        """

    @abstractmethod
    def update_token_table(self, table: TokenTable, changes: Tensor) -> None:
        """Write changes int32 [4, m] to a table: slots, places, ids and counts; no place twice."""

    @abstractmethod
    def apply_penalties(
        self, logits: Tensor, penalised: PenaltyRows, table: TokenTable, lengths: Tensor
    ) -> None:
        """Penalise the first lengths int32 [n] tokens of each row's slot."""

    @abstractmethod
    def token_logprobs(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens int64 [R]: log probability, normalizer, rank.

        float32 [R], float32 [R] (each row's logsumexp) and int64 [R] (1: the likeliest; equal
        logits share the best rank).
        """
