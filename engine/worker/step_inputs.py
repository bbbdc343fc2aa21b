"""A step's inputs, and the adapters of the running batch's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.models.forward_context import AttentionMetadata
from engine.models.lora import NO_ADAPTERS, AdapterWeights, StepAdapters
from engine.multimodal.inputs import MediaTensors
from engine.sampling.request_state import RequestSamplingState
from engine.scheduler.plan import EncodeTask
from kernels.lora import TableSegment


@dataclass(slots=True, frozen=True)
class DraftedRow:
    """A row whose drafts the step verifies.

    Attributes:
        index: index of its sequence in the plan.
        row: row in the batch.
        drafts: in order.
        first: row of the logits after its first draft; those after the others follow.
    """

    index: int
    row: int
    drafts: list[int]
    first: int


#: (index into the plan, its state, first prompt position, count) of requested prompt logprobs.
PromptRow = tuple[int, RequestSamplingState, int, int]


class EncoderRange(NamedTuple):
    """Tokens [start, end) of a step take the vectors from `offset` on of output `key`."""

    start: int
    end: int
    key: bytes
    offset: int


@dataclass(slots=True, kw_only=True)
class SampledRows:
    """The sequences of a step that get a token.

    Attributes:
        sampled: indices into the plan's sequences that have caught up, in the logits' order.
        states: their sampling states, followed by one for each draft of `drafted`: the sequence's
            state if that draft and those before it are accepted.
        target_index: (rows, positions), int64 [len(sampled)] each: where their new tokens go.
        drafted: rows that may get more than one token.
    """

    sampled: list[int]
    states: list[RequestSamplingState]
    target_index: tuple[np.ndarray, np.ndarray]
    drafted: list[DraftedRow] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class StepInputs(SampledRows):
    """One step's inputs, and the sequences that get a token from it.

    Everything but the token ids is known before the previous step has run.

    Attributes:
        token_index: (rows, positions), int64 [num_tokens] each: where in `InputBatch.tokens` the
            step's token ids are.
        context: the batch for attention; its `logits_rows` are the tokens to sample from, in the
            order of `sampled`, followed by those after drafts and of `prompt_logprob_rows`.
        prompt_logprob_rows: the prompt positions to score.
        encode: inputs to encode before the step.
        encoder_ranges: tokens whose embeddings are vectors of an encoder.
        occupied_rows: all rows that hold a sequence, for models with a state per row.
    """

    token_index: tuple[np.ndarray, np.ndarray]
    context: AttentionMetadata
    prompt_logprob_rows: list[PromptRow]
    encode: list[tuple[EncodeTask, MediaTensors]] = field(default_factory=list)
    encoder_ranges: list[EncoderRange] = field(default_factory=list)
    occupied_rows: set[int] = field(default_factory=set)


class RowAdapters:
    """The adapter of each row of the running batch; most rows have none.

    Attributes:
        loaded: adapters by digest.
    """

    def __init__(self, loaded: Mapping[str, AdapterWeights] | None = None) -> None:
        self.loaded = {} if loaded is None else loaded
        self._by_row: dict[int, AdapterWeights] = {}

    def set(self, row: int, digest: str) -> None:
        """Set the adapter of a new sequence's row; "": none."""
        if digest:
            self._by_row[row] = self.loaded[digest]

    def clear(self, row: int) -> None:
        """Remove the adapter of a row whose sequence has left."""
        self._by_row.pop(row, None)

    def vocab_size(self, row: int) -> int:
        """Vocabulary size of a row whose adapter adds tokens; 0: the model's vocabulary."""
        adapter = self._by_row.get(row)
        return 0 if adapter is None else adapter.vocab_size

    def classifier(self, row: int) -> Callable[[Tensor], Tensor] | None:
        """The classification head of a row's adapter; None: the model's."""
        adapter = self._by_row.get(row)
        return None if adapter is None else adapter.classifier

    def for_tokens(self, owner: np.ndarray) -> StepAdapters:
        """The adapters of tokens that belong to the rows `owner`."""
        if not self._by_row:
            return NO_ADAPTERS
        index_of: dict[str, int] = {}
        adapters: list[AdapterWeights] = []
        rows, of_token = np.unique(owner, return_inverse=True)
        group = np.full(len(rows), -1)
        for position, row in enumerate(rows.tolist()):
            if (adapter := self._by_row.get(row)) is not None:
                if adapter.digest not in index_of:
                    index_of[adapter.digest] = len(adapters)
                    adapters.append(adapter)
                group[position] = index_of[adapter.digest]
        group_of_token = group[of_token]
        return StepAdapters(
            [
                (adapter, torch.from_numpy(np.flatnonzero(group_of_token == index)))
                for index, adapter in enumerate(adapters)
            ]
        )

    def for_compiled_step(self, rows: np.ndarray) -> list[TableSegment] | None:
        """The adapters of rows that decode one token each, for a compiled step; None: it doesn't
        support one of them.
        """
        adapters = self.for_tokens(rows)
        if not all(adapter.is_compiled for adapter, _ in adapters.groups):
            return None
        return adapters.tables()
