"""`HiddenStates`: what each sequence's newest token was drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.batch import RunningBatch, Sampled


class HiddenStates:
    """The last hidden state of verified positions, a row of the batch each.

    It belongs to a sequence at a length: a row that another sequence has by now, or whose text went
    on in another way (a grammar added a token), has none.
    """

    def __init__(self, batch: RunningBatch, hidden_size: int) -> None:
        self._batch = batch
        self._states = torch.zeros((len(batch.tokens), hidden_size))
        #: Row -> (sequence, its tokens).
        self._of: dict[int, tuple[int, int]] = {}

    def keep(self, plan: StepPlan, sampled: Sampled, hidden: Tensor, result: StepResult) -> None:
        """A step was sampled and taken over. `hidden`: [n, hidden], in the order of the logits."""
        first = {each.index: each.first for each in sampled.drafted}
        places = []
        for at, index in enumerate(sampled.sampled):
            more = len(result.token_ids[index]) - 1
            place = first[index] + more - 1 if more > 0 else at
            places.append((index, place, more >= 0))
        self._put(plan, places, hidden)

    def keep_rows(
        self,
        plan: StepPlan,
        order: list[int],
        drafts: list[int],
        hidden: Tensor,
        result: StepResult,
    ) -> None:
        """The same where a row's tokens lie behind each other: rows of the plan in `order`, each
        with so many `drafts`.
        """
        places, at = [], 0
        for index, count in zip(order, drafts, strict=True):
            more = len(result.token_ids[index]) - 1
            places.append((index, at + max(0, more), more >= 0))
            at += 1 + count
        self._put(plan, places, hidden)

    def _put(self, plan: StepPlan, places: list[tuple[int, int, bool]], hidden: Tensor) -> None:
        """`places`: index in the plan, row of `hidden`, whether it got a token."""
        rows, found = [], []
        for index, place, got in places:
            seq_id = plan.seq_ids[index]
            row = self._batch.row_of[seq_id]
            self._of.pop(row, None)
            if got:
                self._of[row] = seq_id, int(self._batch.num_tokens[row])
                rows.append(row)
                found.append(place)
        if rows:
            self._states[rows] = hidden[found].float()

    def row_of(self, seq_id: int) -> int | None:
        """The row of a sequence whose newest token was drawn from what is kept."""
        row = self._batch.row_of.get(seq_id)
        if row is None or self._of.get(row) != (seq_id, int(self._batch.num_tokens[row])):
            return None
        return row

    def of(self, rows: list[int]) -> Tensor:
        """float32 [n, hidden], a copy."""
        return self._states[rows]
