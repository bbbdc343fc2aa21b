"""Managers of one KV cache group each: block tables by sequence id, for layers of the same
attention type.

A table grows at its end and is freed as a whole. All groups take blocks from one pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from engine.kv_cache.block import NULL_BLOCK, Block, TenantQuota
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_cache_config import KVCacheGroupSpec
from engine.kv_cache.prefix_cache import HitRequirement, longest_common_hit

#: One sequence's blocks, in the order of its tokens.
BlockTable = list[Block]


class SingleTypeManager(ABC):
    """Block tables of all sequences for one group of layers.

    Args:
        group: what its layers need.
        suffix: appended to a block's hash to make the group's key in the pool.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, group: KVCacheGroupSpec, suffix: bytes = b""
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.group = group
        self.window = group.window
        self.suffix = suffix
        #: By sequence id, for all sequences that hold blocks.
        self.tables: dict[int, BlockTable] = {}

    @property
    def attention_type(self) -> HitRequirement:
        """The blocks that a prefix hit of this group requires."""
        return HitRequirement(self.group.num_required_blocks(self.block_size), (self.suffix,))

    def table_length(self, num_tokens: int) -> int:
        """Length of the block table of a sequence of `num_tokens`."""
        return self.group.table_length(num_tokens, self.block_size)

    def longest_prefix(self, hashes: Sequence[bytes]) -> BlockTable:
        """The cached blocks of the longest prefix of these hashes that is a hit."""
        lookup = self.pool.get_cached_block
        hit = longest_common_hit(
            [self.attention_type],
            len(hashes),
            lambda index, suffix: lookup(hashes[index] + suffix) is not None,
        )
        return self.cached_blocks_of(hashes[:hit])

    @abstractmethod
    def cached_blocks_of(self, hashes: Sequence[bytes]) -> BlockTable:
        """The cached blocks of a prefix that is a hit."""

    @abstractmethod
    def num_blocks_to_allocate(
        self, seq_id: int, num_tokens: int, num_computed: int, prefix: BlockTable | None
    ) -> int:
        """Number of free blocks that `adopt_prefix` and `allocate_new_blocks` would take.

        Args:
            seq_id: the sequence.
            num_tokens: its tokens after the step.
            num_computed: tokens whose KV is computed.
            prefix: cached blocks of a sequence that has no table yet.
        """

    @abstractmethod
    def num_blocks_after(
        self, seq_id: int, num_tokens: int, num_computed: int, prefix: BlockTable | None
    ) -> int:
        """Number of blocks of the sequence after `adopt_prefix` and `allocate_new_blocks`."""

    @abstractmethod
    def adopt_prefix(self, seq_id: int, prefix: BlockTable, quota: TenantQuota) -> None:
        """Start a sequence's table with the blocks of a cached prefix."""

    @abstractmethod
    def allocate_new_blocks(
        self, seq_id: int, num_tokens: int, num_computed: int, quota: TenantQuota
    ) -> BlockTable:
        """Append the blocks that `num_tokens` tokens need; returns the new ones."""

    @abstractmethod
    def remove_skipped_blocks(self, seq_id: int, num_computed: int, quota: TenantQuota) -> None:
        """Free blocks that no later token attends to, and put null blocks in their place."""

    @abstractmethod
    def cache(self, seq_id: int, hashes: Sequence[bytes], first: int, end: int) -> None:
        """Cache the sequence's full blocks [first, end)."""

    @abstractmethod
    def uncache_from(self, seq_id: int, hashes: Sequence[bytes], first: int) -> None:
        """Uncache the sequence's blocks from index `first` on. `hashes`: of all its cached
        blocks.
        """

    @abstractmethod
    def free(self, seq_id: int, quota: TenantQuota) -> None:
        """Free all blocks of the sequence, if it has any."""

    def blocks_by_sequence(self) -> Iterator[tuple[int, BlockTable]]:
        """(sequence id, blocks) of all blocks in use."""
        return iter(self.tables.items())


class FullAttentionManager(SingleTypeManager):
    """Every token attends to all tokens before it, so a sequence keeps all of its blocks."""

    def longest_prefix(self, hashes: Sequence[bytes]) -> BlockTable:
        prefix: BlockTable = []
        for block_hash in hashes:
            block = self.pool.get_cached_block(block_hash + self.suffix)
            if block is None:
                break
            prefix.append(block)
        return prefix

    def cached_blocks_of(self, hashes: Sequence[bytes]) -> BlockTable:
        return [_get_cached_block(self.pool, block_hash + self.suffix) for block_hash in hashes]

    def num_blocks_to_allocate(
        self, seq_id: int, num_tokens: int, num_computed: int, prefix: BlockTable | None
    ) -> int:
        if prefix is not None:
            num_unused = sum(block.ref_count == 0 for block in prefix)
            return self.table_length(num_tokens) - len(prefix) + num_unused
        return max(0, self.table_length(num_tokens) - len(self.tables.get(seq_id, ())))

    def num_blocks_after(
        self, seq_id: int, num_tokens: int, num_computed: int, prefix: BlockTable | None
    ) -> int:
        return self.table_length(num_tokens)

    def adopt_prefix(self, seq_id: int, prefix: BlockTable, quota: TenantQuota) -> None:
        self.pool.touch(prefix, quota)
        self.tables[seq_id] = prefix

    def allocate_new_blocks(
        self, seq_id: int, num_tokens: int, num_computed: int, quota: TenantQuota
    ) -> BlockTable:
        table = self.tables.setdefault(seq_id, [])
        new_blocks = self.pool.get_new_blocks(
            max(0, self.table_length(num_tokens) - len(table)), quota
        )
        table += new_blocks
        return new_blocks

    def remove_skipped_blocks(self, seq_id: int, num_computed: int, quota: TenantQuota) -> None:
        """Do nothing: all blocks are needed."""

    def cache(self, seq_id: int, hashes: Sequence[bytes], first: int, end: int) -> None:
        table, suffix = self.tables[seq_id], self.suffix
        for index in range(first, end):
            block = table[index]
            if block.block_hash is None:
                self.pool.cache_block(block, hashes[index] + suffix)

    def uncache_from(self, seq_id: int, hashes: Sequence[bytes], first: int) -> None:
        for block in self.tables[seq_id][first:]:
            self.pool.evict(block)

    def free(self, seq_id: int, quota: TenantQuota) -> None:
        table = self.tables.pop(seq_id, None)
        if table is not None:
            self.pool.free_blocks(table, quota)


class CrossAttentionManager(FullAttentionManager):
    """Every token attends to all states of an encoder, which take the place of tokens here.

    A table is allocated completely when its sequence starts, and shared by all sequences with the
    same encoder input. Its blocks are cached under the input's key, not under hashes of tokens.
    """

    def table_length(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_after(
        self, seq_id: int, num_tokens: int, num_computed: int, prefix: BlockTable | None
    ) -> int:
        return len(self.tables[seq_id]) if prefix is None else self.table_length(num_tokens)

    def cached_states(self, key: bytes, num_states: int) -> BlockTable:
        """The cached blocks of the encoder states; [] unless all of them are cached."""
        blocks: BlockTable = []
        for block_key in self._block_keys(key, self.table_length(num_states)):
            block = self.pool.get_cached_block(block_key)
            if block is None:
                return []
            blocks.append(block)
        return blocks

    def cache_states(self, seq_id: int, key: bytes) -> None:
        """Cache a sequence's blocks under the key of its encoder input."""
        table = self.tables[seq_id]
        for block, block_key in zip(table, self._block_keys(key, len(table)), strict=True):
            if block.block_hash is None:
                self.pool.cache_block(block, block_key)

    def uncache_states(self, key: bytes, num_states: int) -> None:
        """Uncache encoder states, which were never computed."""
        for block_key in self._block_keys(key, self.table_length(num_states)):
            self.pool.uncache_all(block_key)

    def _block_keys(self, key: bytes, num_blocks: int) -> list[bytes]:
        """A key for each block of encoder states."""
        return [key + index.to_bytes(4, "little") + self.suffix for index in range(num_blocks)]

    def cache(self, seq_id: int, hashes: Sequence[bytes], first: int, end: int) -> None:
        """Do nothing: blocks hold no tokens."""

    def uncache_from(self, seq_id: int, hashes: Sequence[bytes], first: int) -> None:
        """Do nothing: see `uncache_states`."""


class SlidingWindowManager(SingleTypeManager):
    """A token attends to a window of the last tokens.

    Blocks that leave the window are freed while the sequence runs, and a cached prefix takes only
    those that the next token attends to; `NULL_BLOCK` replaces the others.
    """

    def cached_blocks_of(self, hashes: Sequence[bytes]) -> BlockTable:
        first = min(self._first_needed(len(hashes) * self.block_size), len(hashes))
        blocks = [
            _get_cached_block(self.pool, block_hash + self.suffix) for block_hash in hashes[first:]
        ]
        return [NULL_BLOCK] * first + blocks

    def num_blocks_to_allocate(
        self, seq_id: int, num_tokens: int, num_computed: int, prefix: BlockTable | None
    ) -> int:
        num_free = sum(block.ref_count == 0 for block in prefix or () if block is not NULL_BLOCK)
        return num_free + self._missing(seq_id, num_tokens, num_computed, prefix)

    def num_blocks_after(
        self, seq_id: int, num_tokens: int, num_computed: int, prefix: BlockTable | None
    ) -> int:
        table = self.tables.get(seq_id, ()) if prefix is None else prefix
        num_allocated = sum(block is not NULL_BLOCK for block in table)
        return num_allocated + self._missing(seq_id, num_tokens, num_computed, prefix)

    def adopt_prefix(self, seq_id: int, prefix: BlockTable, quota: TenantQuota) -> None:
        self.pool.touch([block for block in prefix if block is not NULL_BLOCK], quota)
        self.tables[seq_id] = prefix

    def allocate_new_blocks(
        self, seq_id: int, num_tokens: int, num_computed: int, quota: TenantQuota
    ) -> BlockTable:
        table = self.tables.setdefault(seq_id, [])
        length = len(table)
        total = max(length, self.table_length(num_tokens))
        skipped = min(total, max(length, self._first_needed(num_computed))) - length
        new_blocks = [NULL_BLOCK] * skipped
        new_blocks += self.pool.get_new_blocks(total - length - skipped, quota)
        table += new_blocks
        return new_blocks

    def remove_skipped_blocks(self, seq_id: int, num_computed: int, quota: TenantQuota) -> None:
        table = self.tables[seq_id]
        end = min(self._first_needed(num_computed), len(table))
        start = end
        while start > 0 and table[start - 1] is not NULL_BLOCK:
            start -= 1
        if start < end:
            self.pool.free_blocks(table[start:end], quota)
            table[start:end] = [NULL_BLOCK] * (end - start)

    def cache(self, seq_id: int, hashes: Sequence[bytes], first: int, end: int) -> None:
        table, suffix = self.tables[seq_id], self.suffix
        for index in range(first, end):
            block = table[index]
            if block is not NULL_BLOCK and block.block_hash is None:
                self.pool.cache_block(block, hashes[index] + suffix)

    def uncache_from(self, seq_id: int, hashes: Sequence[bytes], first: int) -> None:
        # By hash, because some blocks may have left the window since.
        for block_hash in hashes[first:]:
            self.pool.uncache_all(block_hash + self.suffix)

    def free(self, seq_id: int, quota: TenantQuota) -> None:
        table = self.tables.pop(seq_id, None)
        if table is not None:
            self.pool.free_blocks([block for block in table if block is not NULL_BLOCK], quota)

    def _first_needed(self, num_computed: int) -> int:
        """Index of the first block that the token after `num_computed` tokens attends to."""
        return self.group.first_needed_block(num_computed, self.block_size)

    def _missing(
        self, seq_id: int, num_tokens: int, num_computed: int, prefix: BlockTable | None
    ) -> int:
        """Number of new blocks after the sequence's table, or after its prefix."""
        length = len(self.tables.get(seq_id, ()) if prefix is None else prefix)
        first = max(length, self._first_needed(num_computed))
        return max(0, self.table_length(num_tokens) - first)


def _get_cached_block(pool: BlockPool, key: bytes) -> Block:
    """A block that has just been looked up and must be cached."""
    block = pool.get_cached_block(key)
    if block is None:
        raise RuntimeError("A cached block went while it was looked up.")
    return block
