"""Choosing tokens with the kernels: one call for all rows, without sorting any.

The semantics are those of `filters` and `draw`, on the same random numbers. The sums behind a draw
are rounded in another order, so a number that falls within rounding of the border between two
tokens may take the other one; nothing else differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.state import SequenceSampling
from engine.sampling.transfer import to_device
from kernels import KernelSet
from kernels.steps import StepChoice


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The settings of all rows, greedy ones included, as `KernelSet.sample` takes them."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(
        cls, states: Sequence[SequenceSampling], vocab_size: int, device: torch.device
    ) -> RowSettings:
        """One row a state."""
        params = [state.params for state in states]
        top_k = [vocab_size if p.top_k < 1 else p.top_k for p in params]
        temperature = [0.0 if p.greedy else p.temperature for p in params]
        return cls(
            to_device(torch.tensor(temperature, dtype=torch.float32), device),
            to_device(torch.tensor(top_k, dtype=torch.int64), device),
            to_device(torch.tensor([p.top_p for p in params], dtype=torch.float64), device),
            to_device(torch.tensor([p.min_p for p in params], dtype=torch.float64), device),
        )

    def with_seeds(self, seeds: NDArray[np.uint64]) -> StepChoice:
        """The same for kernels that make the random numbers themselves."""
        return StepChoice(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            torch.from_numpy(seeds.view(np.int64)),
        )


class CompiledChoice:
    """Chooses by the kernels what they can, for one sampler."""

    def __init__(self, ops: KernelSet) -> None:
        self._ops = ops
        self._states: list[SequenceSampling] = []
        self._settings: RowSettings | None = None

    def takes(self, logits: Tensor) -> bool:
        """Whether the kernels take these logits."""
        return logits.dtype == torch.float32 and logits.device.type == self._ops.device.type

    def greedy(self, logits: Tensor) -> Tensor:
        """[n] likeliest tokens of float32 [n, vocab]; -1 where the largest logit isn't finite."""
        return self._ops.argmax(logits.contiguous())

    def sample(self, logits: Tensor, states: list[SequenceSampling], uniform: Tensor) -> Tensor:
        """[n] tokens of float32 [n, vocab], each by its state's settings and random number."""
        if self._settings is None or self._states is not states:
            settings = RowSettings.of(states, logits.shape[-1], logits.device)
            self._states, self._settings = states, settings
        chosen = self._settings
        return self._ops.sample(
            logits.contiguous(),
            chosen.temperature,
            chosen.top_k,
            chosen.top_p,
            chosen.min_p,
            uniform,
        )
