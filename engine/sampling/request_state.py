"""`RequestSamplingState`: the sampler's state of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.contract.sampling_params import SamplingParams


class TokenCounts:
    """Distinct tokens of a sequence in growing arrays, so that penalties touch only those.

    Args:
        prompt: tokens that count as present, with no occurrence in the output.
        vocab_size: ids outside [0, vocab_size) are left out, such as placeholders of images.

    Attributes:
        resets: number of complete recounts; a token's index only changes with these.
    """

    __slots__ = ("_counts", "_ids", "_seen", "_slots", "_vocab_size", "prompt", "resets")

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        self.prompt = prompt
        self._vocab_size = vocab_size
        self.resets = 0
        self._reset()

    def _reset(self) -> None:
        self.resets += 1
        distinct = [token for token in dict.fromkeys(self.prompt) if token < self._vocab_size]
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self._ids = np.zeros(len(distinct) + 64, dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._seen = 0

    def update(self, output: Sequence[int]) -> None:
        """Add new tokens of `output` since the last call; recount if the output was shortened."""
        if len(output) < self._seen:
            self._reset()
        self._add(output[self._seen :] if self._seen else output)
        self._seen = len(output)

    def _add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token >= self._vocab_size:
                continue
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token
            self._counts[slot] += 1

    def find_indexes(self, tokens: Iterable[int]) -> NDArray[np.int64]:
        """[distinct] indices of counted tokens in `ids` and `counts`."""
        distinct = {self._slots[token] for token in tokens if token in self._slots}
        return np.fromiter(distinct, np.int64, len(distinct))

    @property
    def ids(self) -> NDArray[np.int64]:
        """[distinct] token ids, in order of first appearance."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """[distinct] occurrences in the output."""
        return self._counts[: len(self._slots)]


@dataclass(slots=True, eq=False)
class RequestSamplingState:
    """One sequence's sampling state, which the runner keeps as long as the sequence.

    Attributes:
        params: must not be modified.
        prompt_token_ids: [num_prompt_tokens].
        output_token_ids: the live list, which the runner appends to. Its length is the position to
            sample for, so a sequence that is resumed or recomputed continues with the same random
            numbers.
        seed: [0, 2**64), different for each output of a request.
        vocab_size: number of its logits if an adapter adds tokens; 0: the model's.
        counts: the sampler's cache for penalties.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]
    seed: int
    vocab_size: int = 0
    counts: TokenCounts | None = field(default=None, init=False, repr=False)

    def with_drafts(self, drafts: Sequence[int]) -> list[RequestSamplingState]:
        """Yield the states after the first draft is accepted, after the second, and so on."""
        return [
            RequestSamplingState(
                self.params,
                self.prompt_token_ids,
                [*self.output_token_ids, *drafts[:count]],
                self.seed,
                self.vocab_size,
            )
            for count in range(1, len(drafts) + 1)
        ]

    def token_counts(self, vocab_size: int) -> TokenCounts:
        """Return up-to-date counts; the prompt is included for the repetition penalty only."""
        if self.counts is None:
            counts_prompt = self.params.repetition_penalty != 1.0
            self.counts = TokenCounts(self.prompt_token_ids if counts_prompt else (), vocab_size)
        self.counts.update(self.output_token_ids)
        return self.counts
