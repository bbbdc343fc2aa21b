"""The contract of a whole decode step in one call, around a `CompiledDecoder`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from kernels.layers import LinearLayer
from kernels.lora import TableUse


@dataclass(frozen=True, slots=True)
class StepEnds:
    """What a model has before its first layer and after its last.

    Attributes:
        embedding: rows [vocab, H] of tokens, times `embedding_scale`.
        positions: float32 [P, H], whose row `position + position_offset` is added; None: nothing.
        head: H to vocab; its logits are multiplied by `logit_scale`.
    """

    embedding: LinearLayer
    head: LinearLayer
    positions: Tensor | None = None
    position_offset: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class StepTables:
    """The running batch, a row a sequence, as a step finds it and leaves it.

    Attributes:
        tokens: int32 [R, longest + 1], prompt and output.
        block_tables: int32 [G, R, blocks], by KV cache group.
        num_prompt, num_tokens, num_computed: int64 [R]; of the tokens, those that came with the
            request, all, and those whose KV is there.
    """

    tokens: Tensor
    block_tables: Tensor
    num_prompt: Tensor
    num_tokens: Tensor
    num_computed: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEdits:
    """What is done to a sequence's logits before a token is chosen, in this order; ids are those of
    the vocabulary.

    Attributes:
        allowed: int32 [words], bit t % 32 of word t // 32 set where token t may come; None: all.
        forbidden: tokens that never come.
        words: two tokens or more each; the last never comes behind the others in the output.
        ends: tokens that don't come before there are `min_tokens`.
        bias: what is added, by token.
        repetition, frequency, presence: penalties, as in `kernels.logits.PenalisedRows`.
        counts_prompt: whether the prompt's tokens are repeated, too.
        num_logprobs: log probabilities of the untouched logits, of the chosen token and of so many
            of the likeliest; -1: none.
    """

    allowed: Tensor | None = None
    forbidden: Sequence[int] = ()
    words: Sequence[Sequence[int]] = ()
    ends: Sequence[int] = ()
    min_tokens: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    counts_prompt: bool = True
    num_logprobs: int = -1


class StepScores(NamedTuple):
    """Log probabilities by token of a step, of the rows whose `RowEdits` ask for some: ids int64,
    values float32 and ranks int64, [tokens, 1 + the most that any row asks for]. The chosen token
    first, then the likeliest; of a row that asks for fewer what is beyond them means nothing.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor


@dataclass(frozen=True, slots=True)
class StepChoice:
    """How each sequence of a step chooses, as `KernelSet.sample` takes it; [n] each.

    `seeds` int64 hold unsigned 64-bit numbers: with the count of tokens generated so far, they give
    the random numbers of `engine.sampling.uniforms`. `edits`: none, or one a sequence.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    edits: Sequence[RowEdits] = ()


class BoundStep(ABC):
    """Steps of the same sequences, as `CompiledStep.over` bound them.

    Both ways to run one raise ValueError, and change nothing, where a row doesn't decode: its
    tokens but one are computed, and there is room in the tables for one more behind its drafts.

    Attributes:
        scores: of the last step, where any row's edits ask for some. A row's tokens lie behind each
            other, its own first and then one for each draft.
    """

    scores: StepScores | None = None

    @abstractmethod
    def __call__(self, hidden: Tensor | None = None) -> list[int]:
        """One token a row. Those of the rows that the step chooses for; -1 where the logits are no
        numbers to choose by.

        `hidden`, float32 [tokens of all rows, H], gets what the head took; where the step was made
        with taps, [.., taps * H], what those layers began with, side by side.
        """

    @abstractmethod
    def verify(
        self, drafts: Sequence[int], logits: Tensor | None = None, hidden: Tensor | None = None
    ) -> list[list[int]]:
        """The same with `drafts[i]` drafts of row i, which lie behind its newest token in the
        tables: they are computed in the same step, and hold as far as they are what is chosen.

        Returns the tokens of each row that the step chooses for: one more than its drafts that
        held, none where the logits of the first are no numbers to choose by. `logits` [tokens of
        the other rows, vocab] gets theirs, and of their counts only that of computed tokens goes
        on, by all of them.
        """


class CompiledStep(ABC):
    """Steps over some tables."""

    @abstractmethod
    def over(
        self,
        rows: Tensor,
        choice: StepChoice | None,
        logits: Tensor | None = None,
        adapters: Sequence[TableUse] = (),
    ) -> BoundStep:
        """What runs steps of the sequences in `rows`, int64 [n], as often as it is asked.

        Of the last m rows no token is chosen: `logits`, float32 [m, vocab], gets their logits, and
        the caller chooses, writes the token and counts it. None: m is 0. For the n - m others,
        choice None means that each takes its likeliest token. Tokens and counts are moved on in
        the tables. `adapters` name places in `rows`, as for `KernelSet.add_lora`.
        """
