"""`RowAdapters`: which adapter each row of the running batch goes through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.models.forward_context import AttentionMetadata
from engine.models.lora import NO_ADAPTERS, AdapterWeights, StepAdapters
from engine.sampling.request_state import RequestSamplingState
from kernels.lora import TableSegment

# -- What step_inputs.py takes from engine.worker.sampling_io.


@dataclass(slots=True, frozen=True)
class DraftedRow:
    """A row whose drafts the step checks.

    Attributes:
        index: of its sequence in the plan.
        row: in the batch.
        drafts: in order.
        first: where the logits behind its first draft stand; those behind the others follow.
    """

    index: int
    row: int
    drafts: list[int]
    first: int


# -- What step_inputs.py takes from engine.worker.input_batch.


#: (index into the plan, its state, first prompt position, count) of wanted prompt logprobs.
PromptRow = tuple[int, RequestSamplingState, int, int]


@dataclass(slots=True, kw_only=True)
class SampledRows:
    """Which of a step's sequences get a token.

    Attributes:
        sampled: indices into the plan's sequences that have caught up, in the logits' order.
        states: theirs, for the sampler; behind them one for each draft of `drafted`, as the
            sequence is if that one and those before it hold.
        target_index: (rows, positions), int64 [len(sampled)] each: where their new tokens go.
        drafted: rows that may get more than one.
    """

    sampled: list[int]
    states: list[RequestSamplingState]
    target_index: tuple[np.ndarray, np.ndarray]
    drafted: list[DraftedRow] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class StepInputs(SampledRows):
    """One step's inputs and which sequences get a token from it.

    Everything but the token ids is known before the step before has run.

    Attributes:
        token_index: (rows, positions), int64 [num_tokens] each: where `InputBatch.tokens` holds the
            step's token ids.
        context: the batch for attention; its `logits_rows` are the tokens to sample from, in the
            order of `sampled`, followed by those of `prompt_logprob_rows`.
        prompt_logprob_rows: the prompt positions to score.
        occupied_rows: all rows that have a sequence, for models that keep a state of each.
    """

    token_index: tuple[np.ndarray, np.ndarray]
    context: AttentionMetadata
    prompt_logprob_rows: list[PromptRow]
    occupied_rows: set[int] = field(default_factory=set)


class RowAdapters:
    """Most rows go through none."""

    def __init__(self, loaded: Mapping[str, AdapterWeights] | None = None) -> None:
        """`loaded`: those that plans name by digest; None: they name none."""
        self._loaded = {} if loaded is None else loaded
        self._by_row: dict[int, AdapterWeights] = {}

    def set(self, row: int, digest: str) -> None:
        """A sequence came; "": it goes through none."""
        if digest:
            self._by_row[row] = self._loaded[digest]

    def clear(self, row: int) -> None:
        """The row's sequence has left."""
        self._by_row.pop(row, None)

    def vocab_size(self, row: int) -> int:
        """Tokens that a row may hold, where its adapter brings some; 0: the model's."""
        adapter = self._by_row.get(row)
        return 0 if adapter is None else adapter.vocab_size

    def classifier(self, row: int) -> Callable[[Tensor], Tensor] | None:
        """A pooling model's head of a row in the place of the model's own; None: that one."""
        adapter = self._by_row.get(row)
        return None if adapter is None else adapter.classifier

    def for_tokens(self, owner: np.ndarray) -> StepAdapters:
        """The adapters of tokens that belong to the rows `owner`."""
        if not self._by_row:
            return NO_ADAPTERS
        places: dict[str, int] = {}
        adapters: list[AdapterWeights] = []
        rows, of_token = np.unique(owner, return_inverse=True)
        group = np.full(len(rows), -1)
        for at, row in enumerate(rows.tolist()):
            if (adapter := self._by_row.get(row)) is not None:
                if adapter.digest not in places:
                    places[adapter.digest] = len(adapters)
                    adapters.append(adapter)
                group[at] = places[adapter.digest]
        of_token = group[of_token]
        found = [
            (adapter, torch.from_numpy(np.flatnonzero(of_token == at)))
            for at, adapter in enumerate(adapters)
        ]
        return StepAdapters(found)

    def for_compiled_step(self, rows: np.ndarray) -> list[TableSegment] | None:
        """What takes the rows' tokens, one each, through whole steps in one call, by their places;
        None: one of their adapters can't be run so.
        """
        adapters = self.for_tokens(rows)
        if not all(adapter.is_compiled for adapter, _ in adapters.groups):
            return None
        return adapters.tables()
