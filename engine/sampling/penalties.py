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

# -- Penalties by kernels: which tokens occur is kept on the device, and a step brings what is new.


_CAPACITY = 256


@dataclass(slots=True)
class _SlotState:
    """What a slot has of its sequence.

    Attributes:
        sent: tokens of the output that are in it.
        resets: `TokenCounts.resets` then; another one means that all of it is old.
    """

    slot: int
    sent: int = 0
    resets: int = -1


class GpuPenalties:
    """The penalised sequences of a sampler. A sequence keeps its slot while it is in each batch."""

    def __init__(self, edits: LogitEdits, vocab_size: int, device: torch.device) -> None:
        self._edits, self._vocab_size, self._device = edits, vocab_size, device
        self._held: dict[RequestSamplingState, _SlotState] = {}
        self._table = self._new_table(0, 0)
        self._states: list[RequestSamplingState] = []
        self._rows: PenaltyRows | None = None

    def assign(self, rows: Sequence[int], states: Sequence[RequestSamplingState]) -> None:
        """From now on `rows[i]` is the logits' row of `states[i]`."""
        here = set(states)
        self._held = {state: held for state, held in self._held.items() if state in here}
        taken = {held.slot for held in self._held.values()}
        free = (slot for slot in range(len(states) + len(taken)) if slot not in taken)
        for state in states:
            if state not in self._held:
                self._held[state] = _SlotState(next(free))
        self._states = list(states)
        params = [state.params for state in states]
        self._rows = PenaltyRows(
            self._ints(rows),
            self._ints([self._held[state].slot for state in states]),
            self._floats([p.repetition_penalty for p in params]),
            self._floats([p.frequency_penalty for p in params]),
            self._floats([p.presence_penalty for p in params]),
        )

    def has_capacity(self, vocab_size: int, device: torch.device) -> bool:
        """Whether it is for logits like these."""
        return (vocab_size, device) == (self._vocab_size, self._device)

    def apply(self, logits: Tensor) -> None:
        """Penalise `logits` ([rows, vocab], float32) in place."""
        if self._rows is None:
            return
        lengths = [len(state.token_counts(self._vocab_size).ids) for state in self._states]
        self._make_room(max(lengths))
        changes = [self._token_updates(state) for state in self._states]
        joined = np.concatenate(changes, axis=1)
        if joined.shape[1]:
            self._edits.update_token_table(
                self._table, to_device(torch.from_numpy(joined), self._device)
            )
        self._edits.apply_penalties(logits, self._rows, self._table, self._ints(lengths))

    def _token_updates(self, state: RequestSamplingState) -> NDArray[np.int32]:
        """[4, m]: slot, places, ids and counts of what the slot hasn't got yet."""
        held, counts = self._held[state], state.token_counts(self._vocab_size)
        if held.resets != counts.resets:
            places = np.arange(len(counts.ids))
        else:
            places = counts.places(state.output_token_ids[held.sent :])
        held.sent, held.resets = len(state.output_token_ids), counts.resets
        slots = np.full(len(places), held.slot)
        made = np.stack((slots, places, counts.ids[places], counts.counts[places]))
        return made.astype(np.int32)

    def _make_room(self, longest: int) -> None:
        """Twice as much as is needed, when it's too little; then all slots are written anew."""
        slots, capacity = self._table.ids.shape
        wanted = max((held.slot for held in self._held.values()), default=0) + 1
        if wanted <= slots and longest <= capacity:
            return
        self._table = self._new_table(max(slots, 2 * wanted), max(capacity, _CAPACITY, 2 * longest))
        for held in self._held.values():
            held.resets = -1

    def _new_table(self, slots: int, capacity: int) -> TokenTable:
        ids = torch.zeros((slots, capacity), dtype=torch.int32, device=self._device)
        return TokenTable(ids, torch.zeros_like(ids))

    def _ints(self, values: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int32), self._device)

    def _floats(self, values: Sequence[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float32), self._device)


def is_penalised(state: RequestSamplingState) -> bool:
    """Whether any penalty differs from its neutral value."""
    params = state.params
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


class Penalties:
    """The penalised sequences of a batch.

    Only tokens that occur are touched, so the cost follows the lengths, not the vocabulary.
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
        """Penalise `logits` ([rows, vocab], float32) in place."""
        counts = [state.token_counts(logits.shape[-1]) for state in self.states]
        sizes = [len(count.ids) for count in counts]
        ids = np.concatenate([count.ids for count in counts])
        times = np.concatenate([count.counts for count in counts])
        rows = np.repeat(self.rows, sizes)
        repetition, frequency, presence = np.repeat(self._factors, sizes, axis=0).T
        if logits.device == torch.device("cpu"):
            values = logits.numpy()[rows, ids]
            with np.errstate(all="ignore"):  # a row that is broken is found where it's chosen from
                values = np.where(values > 0, values / repetition, values * repetition)
                values -= frequency * times + presence * (times > 0)
            logits.numpy()[rows, ids] = values
            return
        self._apply_there(logits, rows, ids, times, (repetition, frequency, presence))

    @staticmethod
    def _apply_there(
        logits: Tensor,
        rows: NDArray[np.int64],
        ids: NDArray[np.int64],
        times: NDArray[np.float32],
        factors: tuple[NDArray[np.float32], ...],
    ) -> None:
        """The same by torch, on another device."""
        device = logits.device
        index = torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)
        repetition, frequency, presence = (torch.tensor(each).to(device) for each in factors)
        there = torch.from_numpy(times).to(device)
        values = logits[index]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * there + presence * (there > 0)
        logits[index] = values
