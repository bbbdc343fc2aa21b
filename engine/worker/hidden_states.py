"""Stores of the hidden states that draft heads need."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.scheduler.plan import StepPlan, StepResult
from engine.speculative.heads.base import DraftHeads, DraftRounds, HeadRounds
from engine.worker.input_batch import InputBatch
from engine.worker.step_inputs import StepInputs


class HiddenStateStore(Protocol):
    """Saves the hidden states of the model's steps that draft heads need.

    Attributes:
        needs_all_tokens: it gets the states of `tokens`, not of the rows of the logits.
        aux_layers: layers whose inputs it gets, concatenated; (): the states after the final norm.
    """

    @property
    def needs_all_tokens(self) -> bool: ...

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    def begin(self, plan: StepPlan) -> bool:
        """Whether a step has states to save. The plan's changes have been applied to the batch."""

    def tokens(self, inputs: StepInputs) -> np.ndarray:
        """With `needs_all_tokens`: int64 [n], ascending, the step's tokens whose states it gets."""

    def save(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, result: StepResult) -> None:
        """Save the states of a step whose outputs have been collected.

        `hidden`: in the order of the logits, or with `needs_all_tokens` of `tokens`.
        """

    def save_rows(
        self,
        plan: StepPlan,
        order: list[int],
        drafts: list[int],
        hidden: Tensor,
        result: StepResult,
    ) -> None:
        """As `save` for a step in which every row decodes: `hidden` holds the tokens of the plan's
        rows in `order`, each with its number of `drafts`.
        """

    def row_of(self, seq_id: int) -> int | None:
        """The row of a sequence if the state that its newest token was drawn from is saved."""

    def is_tracked(self, seq_id: int) -> bool:
        """Whether the states that a sequence's next tokens are drawn from will be saved."""

    def process_pending(self) -> None:
        """Run the heads on the tokens that they have deferred."""

    def start_draft_rounds(self, rows: list[int]) -> DraftRounds:
        """Start drafting for these rows; the heads must have processed their tokens."""

    def warm_up(self, count: int) -> None:
        """Run the heads on `count` tokens and, if possible, a round of as many rows."""


class _Step(NamedTuple):
    """States of a step.

    Attributes:
        seq_ids, rows, lengths: each sequence, its row and its number of tokens.
        hidden_rows: rows of `hidden` with their states; None: it has none.
        hidden: [n, hidden].
    """

    seq_ids: list[int]
    rows: list[int]
    lengths: list[int]
    hidden_rows: list[int | None]
    hidden: Tensor


class LastHiddenStates:
    """The last hidden state of verified positions, one per row of the batch.

    A state belongs to a sequence of a certain length: it is lost when another sequence gets the
    row, or when the text continues differently (a grammar added a token).

    Most states are never read, and copies cost time with a small model. So a step's states aren't
    copied until one is read or a step with other sequences follows.
    """

    needs_all_tokens = False
    aux_layers: tuple[int, ...] = ()

    def __init__(
        self, heads: DraftHeads, batch: InputBatch, hidden_size: int, device: torch.device
    ) -> None:
        self._heads, self._batch = heads, batch
        self._states = torch.zeros((len(batch.tokens), hidden_size), device=device)
        #: Row -> (sequence, number of its tokens).
        self._of: dict[int, tuple[int, int]] = {}
        #: The previous step's states, not copied yet.
        self._last: _Step | None = None

    def begin(self, plan: StepPlan) -> bool:
        return True

    def tokens(self, inputs: StepInputs) -> np.ndarray:
        return np.zeros(0, dtype=np.int64)

    def save(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, result: StepResult) -> None:
        first = {drafted.index: drafted.first for drafted in inputs.drafted}
        hidden_rows: list[int | None] = []
        for row, index in enumerate(inputs.sampled):
            num_accepted = len(result.token_ids[index]) - 1
            hidden_row = first[index] + num_accepted - 1 if num_accepted > 0 else row
            hidden_rows.append(hidden_row if num_accepted >= 0 else None)
        self._defer([plan.seq_ids[index] for index in inputs.sampled], hidden_rows, hidden)

    def save_rows(
        self,
        plan: StepPlan,
        order: list[int],
        drafts: list[int],
        hidden: Tensor,
        result: StepResult,
    ) -> None:
        hidden_rows, start = list[int | None](), 0
        for index, count in zip(order, drafts, strict=True):
            num_accepted = len(result.token_ids[index]) - 1
            hidden_rows.append(start + num_accepted if num_accepted >= 0 else None)
            start += 1 + count
        self._defer([plan.seq_ids[index] for index in order], hidden_rows, hidden)

    def _defer(self, seq_ids: list[int], hidden_rows: list[int | None], hidden: Tensor) -> None:
        """Hold a step's states.

        `hidden_rows`: rows of `hidden`, None for a sequence without a token.
        """
        if self._last is not None and self._last.seq_ids != seq_ids:
            self._copy_last()
        rows = [self._batch.row_of[seq_id] for seq_id in seq_ids]
        lengths = self._batch.num_tokens[rows].tolist()
        self._last = _Step(seq_ids, rows, lengths, hidden_rows, hidden)

    def _copy_last(self) -> None:
        last, self._last = self._last, None
        if last is None:
            return
        rows, sources = [], []
        for seq_id, row, length, hidden_row in zip(
            last.seq_ids, last.rows, last.lengths, last.hidden_rows, strict=True
        ):
            self._of.pop(row, None)
            if hidden_row is not None:
                self._of[row] = seq_id, length
                rows.append(row)
                sources.append(hidden_row)
        if rows:
            self._states[rows] = last.hidden[sources].float()

    def row_of(self, seq_id: int) -> int | None:
        self._copy_last()
        row = self._batch.row_of.get(seq_id)
        if row is None or self._of.get(row) != (seq_id, int(self._batch.num_tokens[row])):
            return None
        return row

    def is_tracked(self, seq_id: int) -> bool:
        return True

    def process_pending(self) -> None:
        """Do nothing: these heads defer nothing."""

    def start_draft_rounds(self, rows: list[int]) -> DraftRounds:
        return HeadRounds(self._heads, self._states[rows])

    def warm_up(self, count: int) -> None:
        if count <= len(self._states):
            states = torch.zeros_like(self._states[:count])
            tokens = torch.zeros(count, dtype=torch.int64, device=states.device)
            HeadRounds(self._heads, states).logits(tokens)
