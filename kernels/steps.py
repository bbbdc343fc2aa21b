"""The contract of a whole decode step in one call, around a `CompiledDecoder`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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


class CompiledStep(ABC):
    """Steps over some tables."""

    @abstractmethod
    def over(
        self,
        rows: Tensor,
        choice: StepChoice | None,
        logits: Tensor | None = None,
        adapters: Sequence[TableUse] = (),
    ) -> Callable[[], list[int]]:
        """What runs a step of the sequences in `rows`, int64 [n], as often as it is called.

        Of the last m rows no token is chosen: `logits`, float32 [m, vocab], gets their logits, and
        the caller chooses, writes the token and counts it. None: m is 0. For the n - m others,
        choice None means that each takes its likeliest token. A call gives their new tokens, -1
        where the logits are no numbers to choose by. Tokens and counts are moved on in the tables.
        `adapters` name places in `rows`, as for `KernelSet.add_lora`.

        It raises ValueError, and changes nothing, where a row doesn't decode: its tokens but one
        are computed, and there is room in the tables for one more.
        """
