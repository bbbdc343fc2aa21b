"""From a step's hidden states to logits and tokens, each row's over its own vocabulary.

An adapter may bring tokens that its model hasn't. Its rows' logits have more columns than others',
so each vocabulary's rows are a batch of their own here, and nobody's bits depend on who is beside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.models.adapters import StepAdapters
from engine.models.interface import EngineModel
from engine.sampling.sampler import Sampler, SamplerOutput
from engine.sampling.state import SequenceSampling
from engine.sampling.token_mask import MaskedRows
from engine.sampling.transfer import to_device

#: Samplers of other vocabularies than the model's that stay when a step has no row of theirs.
_KEPT = 16


class StepLogits:
    """Logits of a step's hidden states, some rows at a time."""

    def __init__(self, model: EngineModel, hidden: Tensor, heads: StepAdapters) -> None:
        """`heads`: the adapters that change logits, by rows of `hidden`."""
        self._model, self._hidden, self._heads = model, hidden, heads

    def between(self, start: int, end: int) -> Tensor:
        """Of rows [start, end), which are of one vocabulary."""
        if not self._heads:
            return self._model.logits(self._hidden[start:end])
        return self._adapted(self._hidden[start:end], self._heads.between(start, end))

    def of(self, rows: Sequence[int]) -> Tensor:
        """Of these rows, which are of one vocabulary."""
        at = torch.tensor(rows)
        hidden = self._hidden[to_device(at, self._hidden.device)]
        if not self._heads:
            return self._model.logits(hidden)
        return self._adapted(hidden, self._heads.heads(at))

    def _adapted(self, hidden: Tensor, heads: StepAdapters) -> Tensor:
        model: Any = self._model  # one that takes adapters
        logits: Tensor = model.logits(hidden, heads)
        return logits


class VocabularySampler:
    """Samples a step's tokens, the rows of each vocabulary by a sampler of their own."""

    def __init__(self, sampler: Sampler) -> None:
        """`sampler`: of rows with the model's vocabulary."""
        self._sampler = sampler
        #: By vocabulary, used longest ago first.
        self._others: OrderedDict[int, Sampler] = OrderedDict()

    def sample(
        self,
        logits: StepLogits,
        states: Sequence[SequenceSampling],
        mask: MaskedRows | None,
        drafts: Mapping[int, int],
    ) -> SamplerOutput:
        """The next token of each sequence; see `Sampler.sample`."""
        groups: dict[int, list[int]] = {}
        for row, state in enumerate(states):
            groups.setdefault(state.vocab_size, []).append(row)
        if len(groups) == 1:
            (size,) = groups
            whole = logits.between(0, len(states))
            return self._of(size).sample(whole, states, mask, drafts)
        made = SamplerOutput(torch.empty(len(states), dtype=torch.int64), [None] * len(states))
        for size, rows in groups.items():
            at = {row: place for place, row in enumerate(rows)}
            output = self._of(size).sample(
                logits.of(rows),
                [states[row] for row in rows],
                None if mask is None else mask.of(rows),
                {at[row]: draft for row, draft in drafts.items() if row in at},
            )
            _put(made, rows, output)
        return made

    def _of(self, vocab_size: int) -> Sampler:
        """The sampler of a vocabulary; it remembers the rows of the step before."""
        if not vocab_size:
            return self._sampler
        found = self._others.pop(vocab_size, None) or self._sampler.sibling()
        self._others[vocab_size] = found
        while len(self._others) > _KEPT:
            self._others.popitem(last=False)
        return found


def _put(whole: SamplerOutput, rows: Sequence[int], output: SamplerOutput) -> None:
    """What was sampled for some rows."""
    whole.token_ids[rows] = output.token_ids.cpu()
    for row, scores in zip(rows, output.logprobs, strict=True):
        whole.logprobs[row] = scores
    whole.errors |= {rows[place]: why for place, why in output.errors.items()}
    whole.candidates |= {rows[place]: each for place, each in output.candidates.items()}
