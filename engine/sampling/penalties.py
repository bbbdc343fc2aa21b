"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.request_state import RequestSamplingState
from kernels.logit_edits import LogitEdits, PenaltyRows, TokenTable
from kernels.tensors import to_device

_CAPACITY = 256


@dataclass(slots=True)
class _SlotState:
    """The part of a sequence's output that is in the device's table.

    Attributes:
        sent: number of output tokens in the slot.
        resets: `TokenCounts.resets` at that time; a different value means that the slot is stale.
    """

    slot: int
    sent: int = 0
    resets: int = -1


class GpuPenalties:
    """Penalties by kernels. The table of tokens stays on the device; a step sends only new tokens.

    A sequence keeps its slot while it is in every batch.
    """

    def __init__(self, edits: LogitEdits, vocab_size: int, device: torch.device) -> None:
        self._edits, self._vocab_size, self._device = edits, vocab_size, device
        self._slots: dict[RequestSamplingState, _SlotState] = {}
        self._table = self._new_table(0, 0)
        self._states: list[RequestSamplingState] = []
        self._rows: PenaltyRows | None = None

    def assign(self, rows: Sequence[int], states: Sequence[RequestSamplingState]) -> None:
        """Set the batch: `rows[i]` is the logits' row of `states[i]`."""
        batch = set(states)
        self._slots = {state: slot for state, slot in self._slots.items() if state in batch}
        used = {slot.slot for slot in self._slots.values()}
        free = (index for index in range(len(states) + len(used)) if index not in used)
        for state in states:
            if state not in self._slots:
                self._slots[state] = _SlotState(next(free))
        self._states = list(states)
        params = [state.params for state in states]
        self._rows = PenaltyRows(
            self._ints(rows),
            self._ints([self._slots[state].slot for state in states]),
            self._floats([p.repetition_penalty for p in params]),
            self._floats([p.frequency_penalty for p in params]),
            self._floats([p.presence_penalty for p in params]),
        )

    def has_capacity(self, vocab_size: int, device: torch.device) -> bool:
        """Whether it applies to these logits' device and shape."""
        return (vocab_size, device) == (self._vocab_size, self._device)

    def apply(self, logits: Tensor) -> None:
        """Penalize `logits` ([rows, vocab], float32) in place."""
        if self._rows is None:
            return
        lengths = [len(state.token_counts(self._vocab_size).ids) for state in self._states]
        self._reserve(max(lengths))
        changes = [self._token_updates(state) for state in self._states]
        joined = np.concatenate(changes, axis=1)
        if joined.shape[1]:
            self._edits.update_token_table(
                self._table, to_device(torch.from_numpy(joined), self._device)
            )
        self._edits.apply_penalties(logits, self._rows, self._table, self._ints(lengths))

    def _token_updates(self, state: RequestSamplingState) -> NDArray[np.int32]:
        """Return [4, m]: slot, columns, ids and counts of tokens that the slot lacks."""
        slot, counts = self._slots[state], state.token_counts(self._vocab_size)
        if slot.resets != counts.resets:
            columns = np.arange(len(counts.ids))
        else:
            columns = counts.find_indexes(state.output_token_ids[slot.sent :])
        slot.sent, slot.resets = len(state.output_token_ids), counts.resets
        slots = np.full(len(columns), slot.slot)
        updates = np.stack((slots, columns, counts.ids[columns], counts.counts[columns]))
        return updates.astype(np.int32)

    def _reserve(self, num_tokens: int) -> None:
        """If the table is too small, grow it to twice the needed size and rewrite all slots."""
        num_slots, capacity = self._table.ids.shape
        required = max((slot.slot for slot in self._slots.values()), default=0) + 1
        if required <= num_slots and num_tokens <= capacity:
            return
        self._table = self._new_table(
            max(num_slots, 2 * required), max(capacity, _CAPACITY, 2 * num_tokens)
        )
        for slot in self._slots.values():
            slot.resets = -1

    def _new_table(self, slots: int, capacity: int) -> TokenTable:
        ids = torch.zeros((slots, capacity), dtype=torch.int32, device=self._device)
        return TokenTable(ids, torch.zeros_like(ids))

    def _ints(self, values: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int32), self._device)

    def _floats(self, values: Sequence[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float32), self._device)


def is_penalized(state: RequestSamplingState) -> bool:
    """Whether any penalty differs from its neutral value."""
    params = state.params
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


class Penalties:
    """The penalized sequences of a batch.

    Only tokens that occur are modified, so the cost depends on lengths, not on the vocabulary.
    """

    def __init__(self, rows: Sequence[int], states: Sequence[RequestSamplingState]) -> None:
        """`rows[i]` is the logits' row of `states[i]`."""
        self.rows = np.asarray(rows, dtype=np.int64)
        self.states = states
        params = [state.params for state in states]
        self._factors = np.array(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params],
            dtype=np.float32,
        )

    def apply(self, logits: Tensor) -> None:
        """Penalize `logits` ([rows, vocab], float32) in place."""
        counts = [state.token_counts(logits.shape[-1]) for state in self.states]
        sizes = [len(count.ids) for count in counts]
        ids = np.concatenate([count.ids for count in counts])
        times = np.concatenate([count.counts for count in counts])
        rows = np.repeat(self.rows, sizes)
        repetition, frequency, presence = np.repeat(self._factors, sizes, axis=0).T
        if logits.device == torch.device("cpu"):
            values = logits.numpy()[rows, ids]
            with np.errstate(all="ignore"):  # invalid rows are detected by sampling
                values = np.where(values > 0, values / repetition, values * repetition)
                values -= frequency * times + presence * (times > 0)
            logits.numpy()[rows, ids] = values
            return
        device = logits.device
        index = torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)
        factor, per_token, once, count = (
            torch.tensor(array).to(device) for array in (repetition, frequency, presence, times)
        )
        old = logits[index]
        old = torch.where(old > 0, old / factor, old * factor)
        logits[index] = old - (per_token * count + once * (count > 0))
