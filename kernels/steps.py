"""The contract of a whole decode step in one call, around a `CompiledDecoder`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class StepChoice:
    """How each sequence of a step chooses, as `KernelSet.sample` takes it; [n] each.

    `seeds` int64 hold unsigned 64-bit numbers: with the count of tokens generated so far, they give
    the random numbers of `engine.sampling.uniforms`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor


class BoundStep(ABC):
    """Steps of the same sequences, as `CompiledStep.over` bound them.

    Both ways to run one raise ValueError, and change nothing, where a row doesn't decode: its
    tokens but one are computed, and there is room in the tables for one more behind its drafts.
    """

    @abstractmethod
    def __call__(self) -> list[int]:
        """One token a row. Those of the rows that the step chooses for; -1 where the logits are no
        numbers to choose by.
        """

    @abstractmethod
    def verify(self, drafts: Sequence[int], logits: Tensor | None = None) -> list[list[int]]:
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
