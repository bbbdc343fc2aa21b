"""Chooses the captured graph for a batch."""

from __future__ import annotations

import bisect
import enum
import logging
from collections.abc import Sequence
from typing import NamedTuple

from kernels.attention import GraphSupport

log = logging.getLogger(__name__)


class CUDAGraphRuntimeMode(enum.Enum):
    """How one batch runs."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


class CUDAGraphMode(enum.Enum):
    """The operator's graph mode: how decode batches run, and how all others do.

    PIECEWISE captures everything except attention, which runs between the pieces; FULL captures
    attention, too, so its backend must support that.
    """

    NONE = (CUDAGraphRuntimeMode.NONE, CUDAGraphRuntimeMode.NONE)
    PIECEWISE = (CUDAGraphRuntimeMode.PIECEWISE, CUDAGraphRuntimeMode.PIECEWISE)
    FULL = (CUDAGraphRuntimeMode.FULL, CUDAGraphRuntimeMode.FULL)
    FULL_DECODE_ONLY = (CUDAGraphRuntimeMode.FULL, CUDAGraphRuntimeMode.NONE)
    FULL_AND_PIECEWISE = (CUDAGraphRuntimeMode.FULL, CUDAGraphRuntimeMode.PIECEWISE)

    @property
    def decode(self) -> CUDAGraphRuntimeMode:
        """Mode of batches in which all sequences have the same small number of tokens."""
        return self.value[0]

    @property
    def mixed(self) -> CUDAGraphRuntimeMode:
        """Mode of all other batches."""
        return self.value[1]


LEVELS = {
    0: CUDAGraphMode.NONE,
    1: CUDAGraphMode.PIECEWISE,
    2: CUDAGraphMode.FULL_AND_PIECEWISE,
    3: CUDAGraphMode.FULL_AND_PIECEWISE,
}
"""Graph mode of each optimization level."""


def requested_mode(name: str | None, level: int, enforce_eager: bool) -> CUDAGraphMode:
    """The mode of the settings: `enforce_eager`, then the mode's name, then the level's default."""
    if enforce_eager:
        return CUDAGraphMode.NONE
    return LEVELS[level] if name is None else CUDAGraphMode[name]


def resolve_mode(
    requested: CUDAGraphMode, support: GraphSupport, query_len: int = 1, obstacle: str | None = None
) -> CUDAGraphMode:
    """The nearest supported mode; a log line reports if it differs.

    Args:
        support: the graph support of the attention backend.
        query_len: tokens of a sequence in a decode batch; more than 1 with speculation.
        obstacle: why the model can't be captured at all.
    """
    if requested is CUDAGraphMode.NONE:
        return requested
    if obstacle is not None:
        return _downgraded(requested, CUDAGraphMode.NONE, obstacle)
    single = GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    needed = single if query_len == 1 else GraphSupport.UNIFORM_BATCH
    if requested.decode is CUDAGraphRuntimeMode.FULL and support < needed:
        reason = f"the attention backend can be captured {support.name.lower()}"
        return _downgraded(requested, CUDAGraphMode.PIECEWISE, reason)
    if requested.mixed is CUDAGraphRuntimeMode.FULL and support < GraphSupport.ALWAYS:
        reason = "the attention backend can be captured in uniform batches alone"
        return _downgraded(requested, CUDAGraphMode.FULL_AND_PIECEWISE, reason)
    return requested


def _downgraded(requested: CUDAGraphMode, to: CUDAGraphMode, reason: str) -> CUDAGraphMode:
    log.warning("CUDA graphs: %s instead of %s: %s.", to.name, requested.name, reason)
    return to


class BatchDescriptor(NamedTuple):
    """Key of a graph, padding included.

    Attributes:
        num_tokens: tokens of the batch.
        num_reqs: sequences; 0 if it doesn't matter, in pieces without attention.
        uniform: all sequences have the same number of tokens.
        adapted: some tokens use adapters.
    """

    num_tokens: int
    num_reqs: int
    uniform: bool
    adapted: bool = False


Key = tuple[CUDAGraphRuntimeMode, BatchDescriptor]


def capture_sizes(
    max_num_seqs: int,
    token_budget: int,
    query_len: int = 1,
    requested_sizes: Sequence[int] | None = None,
) -> list[int]:
    """Numbers of tokens to capture, ascending: dense for small batches, up to 512.

    Every decode batch of up to 512 tokens has a graph that is hardly larger.

    Args:
        query_len: tokens of a sequence in a decode batch; more than 1 with speculation.
        requested_sizes: the operator's sizes instead; those beyond the budget are dropped.
    """
    max_size = min(max(max_num_seqs * query_len, 1) * 2, 512, token_budget)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    if requested_sizes is not None:
        max_size, sizes = token_budget, list(requested_sizes)
    if query_len > 1:
        # Batches with drafts have a multiple of query_len tokens, others any number.
        sizes += [-(-size // query_len) * query_len for size in sizes]
    return sorted({size for size in sizes if size <= max_size})


def sparse(sizes: Sequence[int], length: int = 1) -> list[int]:
    """Of the sizes that are multiples of `length`, the largest and repeatedly about half of the
    previous one, ascending, down to the smallest.
    """
    selected: list[int] = []
    fitting = [size for size in sorted(sizes) if size % length == 0]
    for size in reversed(fitting):
        if not selected or size * 2 <= selected[-1] or size == fitting[0]:
            selected.append(size)
    return selected[::-1]


class CUDAGraphDispatcher:
    """Knows which graphs exist, and chooses: FULL, then PIECEWISE, then none.

    Args:
        mode: resolved for the backend.
        sizes: numbers of tokens that are captured, ascending.
        max_num_seqs: maximum number of sequences of a batch.
        query_len: tokens of a sequence in a batch whose drafts are verified; such batches are
            uniform, and so are those of one token per sequence.
        adapted: there are also graphs for batches with adapters, for fewer sizes, in addition to
            those without, whose steps launch nothing for adapters.
    """

    def __init__(
        self, mode: CUDAGraphMode, sizes: list[int], max_num_seqs: int, query_len: int = 1,
        *, adapted: bool = False,
    ) -> None:  # fmt: skip
        self.mode, self.sizes, self.query_len = mode, sorted(sizes), query_len
        self._max_num_seqs, self._lengths = max_num_seqs, sorted({1, query_len})
        self._keys: set[Key] = set()
        self._sizes = {False: self.sizes, True: []}
        if adapted:
            sizes_by_length = [sparse(self.sizes, length) for length in self._lengths]
            self._sizes[True] = sorted(set().union(*sizes_by_length))
        for kind, some in self._sizes.items():
            for size in some:
                self._add(size, kind)

    def _add(self, size: int, adapted: bool) -> None:
        if (
            self.mode.mixed is CUDAGraphRuntimeMode.PIECEWISE
            or self.mode.decode is CUDAGraphRuntimeMode.PIECEWISE
        ):
            self._keys.add(
                (CUDAGraphRuntimeMode.PIECEWISE, BatchDescriptor(size, 0, False, adapted))
            )
        if self.mode.mixed is CUDAGraphRuntimeMode.FULL:
            reqs = min(size, self._max_num_seqs)
            self._keys.add((CUDAGraphRuntimeMode.FULL, BatchDescriptor(size, reqs, False, adapted)))
        elif self.mode.decode is CUDAGraphRuntimeMode.FULL:
            for length in self._lengths:
                reqs = size // length
                fits_exactly = size % length == 0 and reqs <= self._max_num_seqs
                if fits_exactly or size == self._smallest_for_all(length, adapted):
                    reqs = min(reqs, self._max_num_seqs)
                    self._keys.add(
                        (CUDAGraphRuntimeMode.FULL, BatchDescriptor(size, reqs, True, adapted))
                    )

    def _smallest_for_all(self, length: int, adapted: bool) -> int:
        """The size to which a batch of all sequences, each of `length` tokens, is padded."""
        return next(iter(self._from(self._max_num_seqs * length, adapted)), 0)

    def _from(self, num_tokens: int, adapted: bool) -> list[int]:
        """The sizes that hold this many tokens."""
        sizes = self._sizes[adapted]
        return sizes[bisect.bisect_left(sizes, num_tokens) :]

    @property
    def keys(self) -> list[Key]:
        """The graphs to capture, largest first: smaller graphs then fit into its memory."""

        def rank(key: Key) -> tuple[int, str, bool]:
            return key[1].num_tokens, key[0].value, key[1].adapted

        return sorted(self._keys, key=rank, reverse=True)

    def drop(self, key: Key) -> None:
        """Remove a graph that couldn't be captured."""
        self._keys.discard(key)

    def dispatch(
        self, num_tokens: int, num_reqs: int, max_query_len: int, *, adapted: bool = False
    ) -> Key:
        """How a batch runs, and its padded size. Without a suitable graph it runs eagerly,
        unpadded.
        """
        even = num_tokens == num_reqs * max_query_len
        uniform = max_query_len if even and max_query_len in self._lengths else 0
        for size in self._from(num_tokens, adapted):
            for descriptor in self._fitting(size, uniform, adapted):
                key = (CUDAGraphRuntimeMode.FULL, descriptor)
                if key in self._keys and num_reqs <= descriptor.num_reqs:
                    return key
            key = (CUDAGraphRuntimeMode.PIECEWISE, BatchDescriptor(size, 0, False, adapted))
            if key in self._keys and (
                not uniform or self.mode.decode is not CUDAGraphRuntimeMode.FULL
            ):
                return key
        return self._last_resort(BatchDescriptor(num_tokens, num_reqs, bool(uniform), adapted))

    def _fitting(self, size: int, uniform: int, adapted: bool) -> list[BatchDescriptor]:
        """Full graphs of this size that the batch may use: a decode graph only if it is uniform,
        with the same number of tokens per sequence.
        """
        descriptors = [BatchDescriptor(size, min(size, self._max_num_seqs), False, adapted)]
        if uniform:
            reqs = min(size // uniform, self._max_num_seqs)
            descriptors.insert(0, BatchDescriptor(size, reqs, True, adapted))
        return descriptors

    def _last_resort(self, batch: BatchDescriptor) -> Key:
        """A decode batch too large for full graphs may still fit piecewise ones."""
        for size in self._from(batch.num_tokens, batch.adapted):
            key = (CUDAGraphRuntimeMode.PIECEWISE, BatchDescriptor(size, 0, False, batch.adapted))
            if key in self._keys:
                return key
        return CUDAGraphRuntimeMode.NONE, batch
