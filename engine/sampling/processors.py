"""A caller's own functions on logits (offline use only)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.logits_processor import RequestLogitsProcessor, takes_prompt
from engine.sampling.state import SequenceSampling


class Processors:
    """The logits processors of a batch."""

    def __init__(self, states: Sequence[SequenceSampling]) -> None:
        self._rows = [
            (row, state, [(fn, takes_prompt(fn)) for fn in state.params.logits_processors])
            for row, state in enumerate(states)
            if state.params.logits_processors
        ]

    @property
    def empty(self) -> bool:
        """Whether no sequence has a processor."""
        return not self._rows

    def apply(self, logits: Tensor) -> dict[int, str]:
        """Run them on `logits` ([rows, vocab], float32) in place; returns what failed, by row."""
        errors: dict[int, str] = {}
        for row, state, processors in self._rows:
            try:
                logits[row] = self._run(logits[row].clone(), state, processors)
            except Exception as error:  # a caller's function may raise anything; its row alone ends
                errors[row] = f"A logits processor failed: {type(error).__name__}: {error}"
        return errors

    @staticmethod
    def _run(
        logits: Tensor,
        state: SequenceSampling,
        processors: Sequence[tuple[RequestLogitsProcessor, bool]],
    ) -> Tensor:
        for processor, reads_prompt in processors:
            arguments = [state.output_token_ids, logits]
            if reads_prompt:
                arguments.insert(0, list(state.prompt_token_ids))
            result = processor(*arguments)
            if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
                raise ValueError("it must return logits of the shape it was given")
            logits = result
        return logits
