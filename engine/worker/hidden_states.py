"""`LastHiddenStates`: what each sequence's newest token was drawn from."""

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
    """Keeps what heads need of the model's steps.

    Attributes:
        needs_all_tokens: it is given the states of the tokens that it names, not of those whose
        logits are
            wanted.
        aux_layers: layers whose inputs it is given, side by side; (): the states after the final
        norm.
    """

    @property
    def needs_all_tokens(self) -> bool: ...

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    def begin(self, plan: StepPlan) -> bool:
        """Whether a step has anything that is to be kept; the batch has taken over what changed for
        it, and has computed nothing of it.
        """

    def tokens(self, inputs: StepInputs) -> np.ndarray:
        """With `needs_all_tokens`: int64 [n], ascending, which of the step's tokens it is given."""

    def save(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, result: StepResult) -> None:
        """A step was sampled and taken over. `hidden`: in the order of the logits, or with
        `needs_all_tokens`
        of `tokens`.
        """

    def save_rows(
        self,
        plan: StepPlan,
        order: list[int],
        drafts: list[int],
        hidden: Tensor,
        result: StepResult,
    ) -> None:
        """The same of a step in which every row decodes, with a row's tokens behind each other:
        rows of the plan in `order`, each with so many `drafts`.
        """

    def row_of(self, seq_id: int) -> int | None:
        """The row of a sequence whose newest token was drawn from what is kept."""

    def is_tracked(self, seq_id: int) -> bool:
        """Whether what a sequence's next tokens are drawn from will be kept."""

    def process_pending(self) -> None:
        """Have the heads read what they put off."""

    def start_draft_rounds(self, rows: list[int]) -> DraftRounds:
        """Let the heads go on from these rows, once they have caught up."""

    def warm_up(self, count: int) -> None:
        """Compute what so many tokens ask of the heads, and a round of as many rows where there can
        be one; nothing is kept.
        """


class _Step(NamedTuple):
    """States that a step left.

    Attributes:
        seq_ids, rows, lengths, places: of each sequence its row, its tokens, and where in `hidden`
            its state is; None: nowhere.
        hidden: [n, hidden].
    """

    seq_ids: list[int]
    rows: list[int]
    lengths: list[int]
    places: list[int | None]
    hidden: Tensor


class LastHiddenStates:
    """The last hidden state of verified positions, a row of the batch each.

    It belongs to a sequence at a length: a row that another sequence has by now, or whose text went
    on in another way (a grammar added a token), has none.

    Most are never asked for, and beside a small model a copy of a row isn't nothing. So a step's
    states are put aside as they came, until somebody asks or a step of other sequences follows.
    """

    needs_all_tokens = False
    aux_layers: tuple[int, ...] = ()

    def __init__(
        self, heads: DraftHeads, batch: InputBatch, hidden_size: int, device: torch.device
    ) -> None:
        self._heads, self._batch = heads, batch
        self._states = torch.zeros((len(batch.tokens), hidden_size), device=device)
        #: Row -> (sequence, its tokens).
        self._of: dict[int, tuple[int, int]] = {}
        #: Of the step before.
        self._last: _Step | None = None

    def begin(self, plan: StepPlan) -> bool:
        """See `HiddenStateStore`."""
        return True

    def tokens(self, inputs: StepInputs) -> np.ndarray:
        """See `HiddenStateStore`: it names none."""
        return np.zeros(0, dtype=np.int64)

    def save(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, result: StepResult) -> None:
        """See `HiddenStateStore`."""
        first = {each.index: each.first for each in inputs.drafted}
        places: list[int | None] = []
        for at, index in enumerate(inputs.sampled):
            more = len(result.token_ids[index]) - 1
            place = first[index] + more - 1 if more > 0 else at
            places.append(place if more >= 0 else None)
        self._put_aside([plan.seq_ids[index] for index in inputs.sampled], places, hidden)

    def save_rows(
        self,
        plan: StepPlan,
        order: list[int],
        drafts: list[int],
        hidden: Tensor,
        result: StepResult,
    ) -> None:
        """See `HiddenStateStore`."""
        places, at = list[int | None](), 0
        for index, count in zip(order, drafts, strict=True):
            more = len(result.token_ids[index]) - 1
            places.append(at + max(0, more) if more >= 0 else None)
            at += 1 + count
        self._put_aside([plan.seq_ids[index] for index in order], places, hidden)

    def _put_aside(self, seq_ids: list[int], places: list[int | None], hidden: Tensor) -> None:
        """`places`: rows of `hidden`; None of a sequence that got no token."""
        if self._last is not None and self._last.seq_ids != seq_ids:
            self._put()
        rows = [self._batch.row_of[seq_id] for seq_id in seq_ids]
        lengths = self._batch.num_tokens[rows].tolist()
        self._last = _Step(seq_ids, rows, lengths, places, hidden)

    def _put(self) -> None:
        """Put the last step's states where their rows are."""
        last, self._last = self._last, None
        if last is None:
            return
        rows, found = [], []
        for seq_id, row, length, place in zip(
            last.seq_ids, last.rows, last.lengths, last.places, strict=True
        ):
            self._of.pop(row, None)
            if place is not None:
                self._of[row] = seq_id, length
                rows.append(row)
                found.append(place)
        if rows:
            self._states[rows] = last.hidden[found].float()

    def row_of(self, seq_id: int) -> int | None:
        """See `HiddenStateStore`."""
        self._put()
        row = self._batch.row_of.get(seq_id)
        if row is None or self._of.get(row) != (seq_id, int(self._batch.num_tokens[row])):
            return None
        return row

    def is_tracked(self, seq_id: int) -> bool:
        """See `HiddenStateStore`: each step's states are enough."""
        return True

    def process_pending(self) -> None:
        """See `HiddenStateStore`: nothing is put off."""

    def start_draft_rounds(self, rows: list[int]) -> DraftRounds:
        """See `HiddenStateStore`."""
        return HeadRounds(self._heads, self._states[rows])

    def warm_up(self, count: int) -> None:
        """See `HiddenStateStore`."""
        if count <= len(self._states):
            states = torch.zeros_like(self._states[:count])
            tokens = torch.zeros(count, dtype=torch.int64, device=states.device)
            HeadRounds(self._heads, states).logits(tokens)
