"""Managers of one KV cache group each: block tables by sequence id, for layers that attend alike.

A table grows at its end and is freed whole. All groups take blocks from one pool. What a manager is
told of a sequence are its id, counts of tokens and hashes of blocks; what it is told of a tenant is
its quota.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.kv_cache.block import NULL_BLOCK, Block, TenantQuota
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_cache_config import first_needed_block, most_blocks
from engine.kv_cache.prefix_cache import HitRequirement, longest_common_hit

#: One sequence's blocks, in the order of its tokens.
BlockTable = list[Block]


class SingleTypeManager(ABC):
    """Block tables of all sequences for one group of layers.

    Args:
        window: tokens that a token sees, itself included; 0: all.
        suffix: what the group adds to a block's hash to make its key in the pool.
    """

    def __init__(self, pool: BlockPool, block_size: int, window: int, suffix: bytes) -> None:
        self.pool = pool
        self.block_size = block_size
        self.window = window
        self.suffix = suffix
        #: Of all sequences that hold blocks, by sequence id.
        self.tables: dict[int, BlockTable] = {}

    @property
    def attention_type(self) -> HitRequirement:
        """How far back the first token of a block sees."""
        reach = -(-(self.window - 1) // self.block_size) if self.window else None
        return HitRequirement(reach, (self.suffix,))

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks of one sequence that grows to `num_tokens`, at most `chunk` a step."""
        return most_blocks(self.window, num_tokens, chunk, self.block_size)

    @abstractmethod
    def longest_prefix(self, hashes: Sequence[bytes]) -> BlockTable:
        """The longest run of cached blocks that these begin with."""

    @abstractmethod
    def cached_blocks_of(self, hashes: Sequence[bytes]) -> BlockTable:
        """The cached blocks of a prefix that is known to be a hit."""

    @abstractmethod
    def num_blocks_to_allocate(
        self, seq_id: int, total: int, num_computed: int, found: BlockTable | None
    ) -> int:
        """How many blocks `adopt_prefix` and `allocate_new_blocks` would take from the free list.

        Args:
            seq_id: the sequence.
            total: blocks that its table is to have.
            num_computed: tokens whose KV is there.
            found: the prefix of a sequence that has no table yet.
        """

    @abstractmethod
    def num_blocks_after(
        self, seq_id: int, total: int, num_computed: int, found: BlockTable | None
    ) -> int:
        """How many blocks the sequence would hold after `adopt_prefix` and
        `allocate_new_blocks`."""

    @abstractmethod
    def adopt_prefix(self, seq_id: int, found: BlockTable, quota: TenantQuota) -> None:
        """Begin a sequence's table with the blocks of a cached prefix."""

    @abstractmethod
    def allocate_new_blocks(
        self, seq_id: int, total: int, num_computed: int, quota: TenantQuota
    ) -> BlockTable:
        """Append to a table until it has `total` blocks; returns what was appended."""

    @abstractmethod
    def remove_skipped_blocks(self, seq_id: int, num_computed: int, quota: TenantQuota) -> None:
        """Free the blocks that no coming token sees; their places become null blocks."""

    @abstractmethod
    def cache(self, seq_id: int, hashes: Sequence[bytes], first: int, end: int) -> None:
        """Make the sequence's full blocks [first, end) findable."""

    @abstractmethod
    def uncache_from(self, seq_id: int, hashes: Sequence[bytes], first: int) -> None:
        """Uncache the sequence's blocks from number `first` on. `hashes`: all that were cached."""

    @abstractmethod
    def free(self, seq_id: int, quota: TenantQuota) -> None:
        """Give all blocks of the sequence back, if it has any."""


class FullAttentionManager(SingleTypeManager):
    """Every token sees all before it, so every block is kept until the sequence gives all back."""

    def __init__(self, pool: BlockPool, block_size: int, suffix: bytes = b"") -> None:
        super().__init__(pool, block_size, 0, suffix)

    def longest_prefix(self, hashes: Sequence[bytes]) -> BlockTable:
        """See the base."""
        found: BlockTable = []
        for block_hash in hashes:
            block = self.pool.get_cached_block(block_hash + self.suffix)
            if block is None:
                break
            found.append(block)
        return found

    def cached_blocks_of(self, hashes: Sequence[bytes]) -> BlockTable:
        """See the base."""
        return [_looked_up(self.pool, block_hash + self.suffix) for block_hash in hashes]

    def num_blocks_to_allocate(
        self, seq_id: int, total: int, num_computed: int, found: BlockTable | None
    ) -> int:
        """See the base."""
        if found is not None:
            return total - len(found) + sum(block.ref_count == 0 for block in found)
        return total - len(self.tables.get(seq_id, ()))

    def num_blocks_after(
        self, seq_id: int, total: int, num_computed: int, found: BlockTable | None
    ) -> int:
        """See the base."""
        return total

    def adopt_prefix(self, seq_id: int, found: BlockTable, quota: TenantQuota) -> None:
        """See the base."""
        self.pool.touch(found, quota)
        self.tables[seq_id] = found

    def allocate_new_blocks(
        self, seq_id: int, total: int, num_computed: int, quota: TenantQuota
    ) -> BlockTable:
        """See the base."""
        table = self.tables.setdefault(seq_id, [])
        fresh = self.pool.get_new_blocks(total - len(table), quota)
        table += fresh
        return fresh

    def remove_skipped_blocks(self, seq_id: int, num_computed: int, quota: TenantQuota) -> None:
        """Nothing: all blocks are seen."""

    def cache(self, seq_id: int, hashes: Sequence[bytes], first: int, end: int) -> None:
        """See the base."""
        table, suffix = self.tables[seq_id], self.suffix
        for index in range(first, end):
            block = table[index]
            if block.block_hash is None:
                self.pool.cache_block(block, hashes[index] + suffix)

    def uncache_from(self, seq_id: int, hashes: Sequence[bytes], first: int) -> None:
        """See the base."""
        for block in self.tables[seq_id][first:]:
            self.pool.evict(block)

    def free(self, seq_id: int, quota: TenantQuota) -> None:
        """See the base."""
        table = self.tables.pop(seq_id, None)
        if table is not None:
            self.pool.free_blocks(table, quota)


class SlidingWindowManager(SingleTypeManager):
    """A token sees only the last ones before it.

    Blocks that fall wholly out of the window are given back while the sequence runs, and a cached
    prefix takes only those that the next token sees; `NULL_BLOCK` stands in the others' places.
    """

    def longest_prefix(self, hashes: Sequence[bytes]) -> BlockTable:
        """See the base."""
        lookup = self.pool.get_cached_block
        hit = longest_common_hit(
            [self.attention_type],
            len(hashes),
            lambda index, suffix: lookup(hashes[index] + suffix) is not None,
        )
        return self.cached_blocks_of(hashes[:hit])

    def cached_blocks_of(self, hashes: Sequence[bytes]) -> BlockTable:
        """See the base."""
        first = min(self._first_needed(len(hashes) * self.block_size), len(hashes))
        blocks = [_looked_up(self.pool, block_hash + self.suffix) for block_hash in hashes[first:]]
        return [NULL_BLOCK] * first + blocks

    def num_blocks_to_allocate(
        self, seq_id: int, total: int, num_computed: int, found: BlockTable | None
    ) -> int:
        """See the base."""
        revived = sum(block.ref_count == 0 for block in found or () if block is not NULL_BLOCK)
        return revived + self._missing(seq_id, total, num_computed, found)

    def num_blocks_after(
        self, seq_id: int, total: int, num_computed: int, found: BlockTable | None
    ) -> int:
        """See the base."""
        table = self.tables.get(seq_id, ()) if found is None else found
        held = sum(block is not NULL_BLOCK for block in table)
        return held + self._missing(seq_id, total, num_computed, found)

    def adopt_prefix(self, seq_id: int, found: BlockTable, quota: TenantQuota) -> None:
        """See the base."""
        self.pool.touch([block for block in found if block is not NULL_BLOCK], quota)
        self.tables[seq_id] = found

    def allocate_new_blocks(
        self, seq_id: int, total: int, num_computed: int, quota: TenantQuota
    ) -> BlockTable:
        """See the base."""
        table = self.tables.setdefault(seq_id, [])
        have = len(table)
        skipped = min(total, max(have, self._first_needed(num_computed))) - have
        fresh = [NULL_BLOCK] * skipped
        fresh += self.pool.get_new_blocks(total - have - skipped, quota)
        table += fresh
        return fresh

    def remove_skipped_blocks(self, seq_id: int, num_computed: int, quota: TenantQuota) -> None:
        """See the base."""
        table = self.tables[seq_id]
        end = min(self._first_needed(num_computed), len(table))
        start = end
        while start > 0 and table[start - 1] is not NULL_BLOCK:
            start -= 1
        if start < end:
            self.pool.free_blocks(table[start:end], quota)
            table[start:end] = [NULL_BLOCK] * (end - start)

    def cache(self, seq_id: int, hashes: Sequence[bytes], first: int, end: int) -> None:
        """See the base."""
        table, suffix = self.tables[seq_id], self.suffix
        for index in range(first, end):
            block = table[index]
            if block is not NULL_BLOCK and block.block_hash is None:
                self.pool.cache_block(block, hashes[index] + suffix)

    def uncache_from(self, seq_id: int, hashes: Sequence[bytes], first: int) -> None:
        """See the base. By their hashes, for some may have fallen out of the window since."""
        for block_hash in hashes[first:]:
            self.pool.uncache_all(block_hash + self.suffix)

    def free(self, seq_id: int, quota: TenantQuota) -> None:
        """See the base."""
        table = self.tables.pop(seq_id, None)
        if table is not None:
            self.pool.free_blocks([block for block in table if block is not NULL_BLOCK], quota)

    def _first_needed(self, num_computed: int) -> int:
        """The first block that the token after `num_computed` computed ones sees."""
        return first_needed_block(self.window, num_computed, self.block_size)

    def _missing(self, seq_id: int, total: int, num_computed: int, found: BlockTable | None) -> int:
        """New blocks beyond the sequence's table, or beyond the prefix."""
        have = len(self.tables.get(seq_id, ()) if found is None else found)
        return max(0, total - max(have, self._first_needed(num_computed)))


def _looked_up(pool: BlockPool, key: bytes) -> Block:
    """A cached block that is known to be there."""
    block = pool.get_cached_block(key)
    if block is None:
        raise RuntimeError("A cached block went while it was looked up.")
    return block
