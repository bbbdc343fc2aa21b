"""How long KV blocks stay in the pool, and how often they are used: of a sample of blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.contract.histograms import Histograms
from engine.kv_cache.block import Block

#: One allocated block of so many is followed.
SAMPLE_EVERY = 64


class BlockResidency:
    """Follows every 64th allocated block until it's evicted or taken again.

    A block that held nothing findable when it was taken again was not evicted: only its gaps count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_next = SAMPLE_EVERY
        #: Block id -> when it was allocated, when it was used last.
        self._followed: dict[int, tuple[float, float]] = {}
        self.histograms = Histograms(
            "kv_block_lifetime_seconds",
            "kv_block_idle_before_evict_seconds",
            "kv_block_reuse_gap_seconds",
        )

    def allocated(self, blocks: list[Block]) -> None:
        """These blocks were taken, and hold nothing of before."""
        if self._followed:
            for block in blocks:
                self._followed.pop(block.block_id, None)
        self._until_next -= len(blocks)
        if self._until_next <= 0 and blocks:
            self._until_next = SAMPLE_EVERY
            now = self._clock()
            self._followed[blocks[-1].block_id] = (now, now)

    def used(self, blocks: Iterable[Block]) -> None:
        """These cached blocks were hit by a prefix."""
        if not self._followed:
            return
        for block in blocks:
            seen = self._followed.get(block.block_id)
            if seen is not None:
                now = self._clock()
                self.histograms.observe("kv_block_reuse_gap_seconds", now - seen[1])
                self._followed[block.block_id] = (seen[0], now)

    def freed(self, block: Block) -> None:
        """The last sequence that used this block is done with it."""
        seen = self._followed.get(block.block_id)
        if seen is not None:
            self._followed[block.block_id] = (seen[0], self._clock())

    def evicted(self, block: Block) -> None:
        """This block's cached content makes room for another's."""
        seen = self._followed.pop(block.block_id, None)
        if seen is None:
            return
        now = self._clock()
        self.histograms.observe("kv_block_lifetime_seconds", now - seen[0])
        self.histograms.observe("kv_block_idle_before_evict_seconds", now - seen[1])

    def forget(self) -> None:
        """The cache was emptied: nothing that is followed will be evicted."""
        self._followed.clear()
