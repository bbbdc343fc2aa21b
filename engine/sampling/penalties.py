"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
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
        device = logits.device
        rows = torch.from_numpy(np.repeat(self.rows, sizes)).to(device)
        ids = torch.from_numpy(np.concatenate([count.ids for count in counts])).to(device)
        times = torch.from_numpy(np.concatenate([count.counts for count in counts])).to(device)
        factors = torch.from_numpy(np.repeat(self._factors, sizes, axis=0)).to(device)
        repetition, frequency, presence = factors.unbind(-1)
        values = logits[rows, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * times + presence * (times > 0)
        logits[rows, ids] = values
