"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.state import SequenceSampling


def is_penalised(state: SequenceSampling) -> bool:
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

    def __init__(self, rows: Sequence[int], states: Sequence[SequenceSampling]) -> None:
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
