"""Which captured graph serves a batch."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from engine.worker.cuda.modes import GraphMode, RuntimeMode


class BatchDescriptor(NamedTuple):
    """What a graph was captured for, padding included.

    Attributes:
        num_tokens: of the whole batch.
        num_reqs: sequences; 0 where it doesn't matter, in pieces without attention.
        uniform: all sequences have the same number of tokens.
    """

    num_tokens: int
    num_reqs: int
    uniform: bool


Key = tuple[RuntimeMode, BatchDescriptor]


def capture_sizes(
    max_num_seqs: int, token_budget: int, query_len: int = 1, wanted: Sequence[int] | None = None
) -> list[int]:
    """Numbers of tokens to capture, ascending: dense where batches are small, up to 512.

    Every decode batch of up to 512 tokens finds one that is hardly larger than itself.

    Args:
        query_len: tokens of a sequence in a decode batch; more than 1 with speculation.
        wanted: the operator's own instead; those beyond the budget are left out.
    """
    most = min(max(max_num_seqs * query_len, 1) * 2, 512, token_budget)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    if wanted is not None:
        most, sizes = token_budget, list(wanted)
    if query_len > 1:
        # A batch whose drafts are checked has a multiple of query_len tokens, others any number.
        sizes += [-(-size // query_len) * query_len for size in sizes]
    return sorted({size for size in sizes if size <= most})


class Dispatcher:
    """Knows which graphs there are, and picks: FULL, then PIECEWISE, then none.

    Args:
        mode: resolved for the backend.
        sizes: numbers of tokens that are captured, ascending.
        max_num_seqs: most sequences of a batch.
        query_len: tokens of a sequence in a batch whose drafts are checked; such batches are
            uniform, and so are those of one token a sequence.
    """

    def __init__(
        self, mode: GraphMode, sizes: list[int], max_num_seqs: int, query_len: int = 1
    ) -> None:
        self.mode, self.sizes, self.query_len = mode, sorted(sizes), query_len
        self._max_num_seqs, self._lengths = max_num_seqs, sorted({1, query_len})
        self._keys: set[Key] = set()
        for size in self.sizes:
            self._add(size)

    def _add(self, size: int) -> None:
        if self.mode.mixed is RuntimeMode.PIECEWISE or self.mode.decode is RuntimeMode.PIECEWISE:
            self._keys.add((RuntimeMode.PIECEWISE, BatchDescriptor(size, 0, False)))
        if self.mode.mixed is RuntimeMode.FULL:
            reqs = min(size, self._max_num_seqs)
            self._keys.add((RuntimeMode.FULL, BatchDescriptor(size, reqs, False)))
        elif self.mode.decode is RuntimeMode.FULL:
            for length in self._lengths:
                reqs = size // length
                whole = size % length == 0 and reqs <= self._max_num_seqs
                if whole or size == self._smallest_for_all(length):
                    reqs = min(reqs, self._max_num_seqs)
                    self._keys.add((RuntimeMode.FULL, BatchDescriptor(size, reqs, True)))

    def _smallest_for_all(self, length: int) -> int:
        """The size that a batch of all sequences, each of `length` tokens, is padded to."""
        at = bisect.bisect_left(self.sizes, self._max_num_seqs * length)
        return self.sizes[at] if at < len(self.sizes) else 0

    @property
    def keys(self) -> list[Key]:
        """What is to be captured, largest first: smaller graphs then fit into its memory."""
        return sorted(self._keys, key=lambda key: (key[1].num_tokens, key[0].value), reverse=True)

    def drop(self, key: Key) -> None:
        """Forget a graph that couldn't be captured."""
        self._keys.discard(key)

    def dispatch(self, num_tokens: int, num_reqs: int, max_query_len: int) -> Key:
        """How a batch runs, and as what. Without a graph that holds it, as itself, eagerly."""
        even = num_tokens == num_reqs * max_query_len
        uniform = max_query_len if even and max_query_len in self._lengths else 0
        for size in self.sizes[bisect.bisect_left(self.sizes, num_tokens) :]:
            for descriptor in self._fitting(size, uniform):
                key = (RuntimeMode.FULL, descriptor)
                if key in self._keys and num_reqs <= descriptor.num_reqs:
                    return key
            key = (RuntimeMode.PIECEWISE, BatchDescriptor(size, 0, False))
            if key in self._keys and (not uniform or self.mode.decode is not RuntimeMode.FULL):
                return key
        return self._last_resort(num_tokens, num_reqs, bool(uniform))

    def _fitting(self, size: int, uniform: int) -> list[BatchDescriptor]:
        """Full graphs of that size which the batch may use: a decode one only if it is uniform, of
        so many tokens a sequence."""
        found = [BatchDescriptor(size, min(size, self._max_num_seqs), False)]
        if uniform:
            reqs = min(size // uniform, self._max_num_seqs)
            found.insert(0, BatchDescriptor(size, reqs, True))
        return found

    def _last_resort(self, num_tokens: int, num_reqs: int, uniform: bool) -> Key:
        """A decode batch beyond the full graphs may still fit the pieces."""
        for size in self.sizes[bisect.bisect_left(self.sizes, num_tokens) :]:
            key = (RuntimeMode.PIECEWISE, BatchDescriptor(size, 0, False))
            if key in self._keys:
                return key
        return RuntimeMode.NONE, BatchDescriptor(num_tokens, num_reqs, uniform)
