"""`RequestSamplingState`: what the sampler must know of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.contract.sampling_params import SamplingParams


class TokenCounts:
    """Distinct tokens of a sequence as growing arrays, so that penalties touch only those.

    Args:
        prompt: tokens that count as present with no occurrence in the output.
        vocab_size: ids outside [0, vocab_size) are left out (placeholders of images have such).

    Attributes:
        resets: how often all was counted anew; until then a token keeps its place.
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
        """Take in what `output` has beyond the last call; a shortened output is counted anew."""
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
        """[distinct] indexes of tokens that have been counted, in `ids` and `counts`."""
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
    """One sequence's sampling state. The runner makes it once and keeps it for the sequence's life.

    Attributes:
        params: not to be changed afterwards.
        prompt_token_ids: [num_prompt_tokens].
        output_token_ids: the live list; the runner appends to it. Its length is the position that
            the next token is drawn for, so a sequence that is resumed or recomputed goes on with
            the same random numbers.
        seed: [0, 2**64); resolved, and another for each output of a request.
        vocab_size: columns of its logits, where an adapter brings tokens; 0: the model's.
        counts: the sampler's cache for penalties.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]
    seed: int
    vocab_size: int = 0
    counts: TokenCounts | None = field(default=None, init=False, repr=False)

    def with_drafts(self, drafts: Sequence[int]) -> list[RequestSamplingState]:
        """What the sequence is once the first draft holds, the first two, and so on."""
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
        """Tokens to penalise, up to date. The prompt's count for the repetition penalty alone."""
        if self.counts is None:
            counts_prompt = self.params.repetition_penalty != 1.0
            self.counts = TokenCounts(self.prompt_token_ids if counts_prompt else (), vocab_size)
        self.counts.update(self.output_token_ids)
        return self.counts
