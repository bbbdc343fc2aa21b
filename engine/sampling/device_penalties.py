"""Penalties by kernels: which tokens occur is kept on the device, and a step brings what is new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.state import SequenceSampling
from engine.sampling.transfer import to_device
from kernels.logits import LogitEdits, PenalisedRows, TokenTable

_CAPACITY = 256


@dataclass(slots=True)
class _Held:
    """What a slot has of its sequence.

    Attributes:
        sent: tokens of the output that are in it.
        resets: `TokenCounts.resets` then; another one means that all of it is old.
    """

    slot: int
    sent: int = 0
    resets: int = -1


class DevicePenalties:
    """The penalised sequences of a sampler. A sequence keeps its slot while it is in each batch."""

    def __init__(self, edits: LogitEdits, vocab_size: int, device: torch.device) -> None:
        self._edits, self._vocab_size, self._device = edits, vocab_size, device
        self._held: dict[SequenceSampling, _Held] = {}
        self._table = self._new_table(0, 0)
        self._states: list[SequenceSampling] = []
        self._rows: PenalisedRows | None = None

    def assign(self, rows: Sequence[int], states: Sequence[SequenceSampling]) -> None:
        """From now on `rows[i]` is the logits' row of `states[i]`."""
        here = set(states)
        self._held = {state: held for state, held in self._held.items() if state in here}
        taken = {held.slot for held in self._held.values()}
        free = (slot for slot in range(len(states) + len(taken)) if slot not in taken)
        for state in states:
            if state not in self._held:
                self._held[state] = _Held(next(free))
        self._states = list(states)
        params = [state.params for state in states]
        self._rows = PenalisedRows(
            self._ints(rows),
            self._ints([self._held[state].slot for state in states]),
            self._floats([p.repetition_penalty for p in params]),
            self._floats([p.frequency_penalty for p in params]),
            self._floats([p.presence_penalty for p in params]),
        )

    def fits(self, vocab_size: int, device: torch.device) -> bool:
        """Whether it is for logits like these."""
        return (vocab_size, device) == (self._vocab_size, self._device)

    def apply(self, logits: Tensor) -> None:
        """Penalise `logits` ([rows, vocab], float32) in place."""
        if self._rows is None:
            return
        lengths = [len(state.token_counts(self._vocab_size).ids) for state in self._states]
        self._make_room(max(lengths))
        changes = [self._changes(state) for state in self._states]
        joined = np.concatenate(changes, axis=1)
        if joined.shape[1]:
            self._edits.record(self._table, to_device(torch.from_numpy(joined), self._device))
        self._edits.penalise(logits, self._rows, self._table, self._ints(lengths))

    def _changes(self, state: SequenceSampling) -> NDArray[np.int32]:
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
