"""`HybridKVCacheManager`: one block table for each group of layers that attend alike."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from engine.kv_cache.block import NULL_BLOCK
from engine.kv_cache.hashing import group_key
from engine.kv_cache.layout import KVLayout, first_needed_block, most_blocks
from engine.kv_cache.manager import KVCacheManager, Tables
from engine.kv_cache.prefix_search import AttentionType, longest_common_hit

if TYPE_CHECKING:
    from engine.scheduler.sequence import Sequence


class HybridKVCacheManager(KVCacheManager):
    """Block tables by KV cache group: full attention, sliding windows, or both.

    All tables of a sequence have the same length. Where a sliding-window group needs no block, its
    table holds `NULL_BLOCK`: blocks that fall wholly out of the window are given back whenever the
    sequence needs a new one, and a cached prefix takes only those that the next token sees.

    A block's key in the pool is its hash and its group: the same tokens are cached, and evicted,
    group by group.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, block_size: int, enable_caching: bool = True
    ) -> None:
        super().__init__(num_blocks, block_size, enable_caching)
        self.windows = layout.windows
        self.num_groups = len(layout.groups)
        #: A single group's hashes need no group.
        self._suffixes = [group_key(index) for index in range(self.num_groups)]
        if self.num_groups == 1:
            self._suffixes = [b""]
        self._types = _attention_types(self.windows, self._suffixes, block_size)

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks of one sequence that grows to `num_tokens`, at most `chunk` a step."""
        size = self.block_size
        return sum(most_blocks(window, num_tokens, chunk, size) for window in self.windows)

    def capacity(self, num_blocks: int, chunk: int, longest: int = 0) -> int:
        """Tokens of the longest sequence that can run in so many blocks; see the base."""
        low, high = 0, max(num_blocks * self.block_size, longest)
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle, chunk) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def _find(self, hashes: list[bytes], most: int) -> Tables:
        """Cached blocks by group; those that the next token doesn't see are left out."""
        lookup = self.pool.lookup
        most = min(most, len(hashes))
        hit = longest_common_hit(
            self._types, most, lambda index, suffix: lookup(hashes[index] + suffix) is not None
        )
        found: Tables = []
        for window, suffix in zip(self.windows, self._suffixes, strict=True):
            first = first_needed_block(window, hit * self.block_size, self.block_size)
            table = [NULL_BLOCK] * min(first, hit)
            for block_hash in hashes[first:hit]:
                block = lookup(block_hash + suffix)
                if block is None:
                    raise RuntimeError("A cached block went while it was looked up.")
                table.append(block)
            found.append(table)
        return found

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks that no coming token sees; their places become null blocks."""
        size, computed = self.block_size, sequence.num_computed_tokens
        for window, table in zip(self.windows, sequence.tables, strict=False):
            end = min(first_needed_block(window, computed, size), len(table))
            start = end
            while start > 0 and table[start - 1] is not NULL_BLOCK:
                start -= 1
            if start < end:
                self.pool.free(table[start:end], self.account_of(sequence))
                table[start:end] = [NULL_BLOCK] * (end - start)

    def needed(self, sequence: Sequence, num_tokens: int, prefix: Tables | None = None) -> int:
        """How many blocks `allocate` with the same arguments would take from the free list."""
        revived = sum(
            block.ref_count == 0 and block is not NULL_BLOCK
            for table in prefix or ()
            for block in table
        )
        return revived + self._missing(sequence, num_tokens, prefix)

    def _missing(self, sequence: Sequence, num_tokens: int, prefix: Tables | None) -> int:
        """New blocks beyond the sequence's tables, or beyond the prefix."""
        have = len(prefix[0]) if prefix else len(sequence.blocks)
        computed = have * self.block_size if prefix else sequence.num_computed_tokens
        total = self.blocks_for(num_tokens)
        firsts = (first_needed_block(w, computed, self.block_size) for w in self.windows)
        return sum(max(0, total - max(have, first)) for first in firsts)

    def allocate(
        self, sequence: Sequence, num_tokens: int, prefix: Tables | None = None
    ) -> Tables | None:
        """Make room for the sequence's first `num_tokens` tokens in every group; see the base."""
        tables, account = self._tables_of(sequence), self.account_of(sequence)
        computed = sequence.num_computed_tokens
        if prefix and prefix[0]:
            computed = len(prefix[0]) * self.block_size
            for table, found in zip(tables, prefix, strict=True):
                self.pool.touch((block for block in found if block is not NULL_BLOCK), account)
                table.extend(found)
        total, have = self.blocks_for(num_tokens), len(tables[0])
        fresh: Tables | None = None
        if total > have:
            fresh = []
            for window, table in zip(self.windows, tables, strict=True):
                first = first_needed_block(window, computed, self.block_size)
                skipped = min(total, max(have, first)) - have
                blocks = [NULL_BLOCK] * skipped
                blocks += self.pool.allocate(total - have - skipped, account)
                table.extend(blocks)
                fresh.append(blocks)
        self._cache_full_blocks(sequence, num_tokens)
        return fresh

    def free(self, sequence: Sequence) -> None:
        """Give all of the sequence's blocks back; what is cached stays cached until evicted."""
        account = self.account_of(sequence)
        for table in sequence.tables:
            self.pool.free([block for block in table if block is not NULL_BLOCK], account)
            table.clear()
        sequence.num_cached_blocks = 0

    def forget(self, sequence: Sequence, num_tokens: int) -> None:
        """Uncache the sequence's blocks from token `num_tokens` on: their content never came.

        By their hashes, for some may have fallen out of the window since.
        """
        first = num_tokens // self.block_size
        for block_hash in sequence.block_hashes[first : sequence.num_cached_blocks]:
            for suffix in self._suffixes:
                self.pool.uncache_all(block_hash + suffix)

    def total(self, sequence: Sequence, num_tokens: int, prefix: Tables | None = None) -> int:
        """Blocks in the sequence's tables after `allocate`, null blocks left out."""
        tables = [*sequence.tables, *(prefix or ())]
        held = sum(block is not NULL_BLOCK for table in tables for block in table)
        return held + self._missing(sequence, num_tokens, prefix)

    def forget_all(self, sequence: Sequence) -> None:
        """Uncache all that a sequence, now without blocks, has offered to the cache."""
        for block_hash in sequence.block_hashes:
            for suffix in self._suffixes:
                self.pool.uncache_all(block_hash + suffix)

    def tables(self, sequence: Sequence) -> Tables:
        """The sequence's block tables, one a group."""
        return self._tables_of(sequence)

    def _tables_of(self, sequence: Sequence) -> Tables:
        """The sequence's tables, made when it hasn't them yet."""
        tables = sequence.tables
        while len(tables) < self.num_groups:
            tables.append([])
        return tables

    def _cache_range(self, sequence: Sequence, first: int, end: int) -> None:
        """Cache the sequence's blocks [first, end) of every group."""
        for suffix, table in zip(self._suffixes, sequence.tables, strict=True):
            for index in range(first, end):
                block = table[index]
                if block is not NULL_BLOCK and block.block_hash is None:
                    self.pool.cache(block, sequence.block_hashes[index] + suffix)


def _attention_types(
    windows: tuple[int, ...], suffixes: list[bytes], block_size: int
) -> list[AttentionType]:
    """The groups of equal window together, full attention first."""
    reach = partial(_blocks_before, block_size=block_size)
    return [
        AttentionType(
            reach(window),
            tuple(suffixes[i] for i, other in enumerate(windows) if other == window),
        )
        for window in sorted(set(windows))
    ]


def _blocks_before(window: int, block_size: int) -> int | None:
    """How many blocks before a block's first token that token sees; None: all."""
    return -(-(window - 1) // block_size) if window else None
