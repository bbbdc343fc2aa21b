"""Which tokens a sequence holds and how often, kept up as its output grows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


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

    def places(self, tokens: Iterable[int]) -> NDArray[np.int64]:
        """[distinct] places of tokens that have been counted, in `ids` and `counts`."""
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
