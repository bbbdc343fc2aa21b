"""`KVCacheManager`: gives sequences their blocks, finds cached prefixes, caches full blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kv_cache import cold
from engine.kv_cache.accounts import Account
from engine.kv_cache.block import Block
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.hashing import ROOT, hash_block

if TYPE_CHECKING:
    from engine.scheduler.sequence import Sequence

#: Block tables, one a KV cache group, all of the same length.
Tables = list[list[Block]]


class KVCacheManager:
    """Block tables of all sequences over one `BlockPool`, where every layer attends to everything.

    A sequence's table is `sequence.blocks`; it only ever grows at the end, until it is freed whole.
    `docs/prefix-caching.md` walks through the operations with numbers. `HybridKVCacheManager` is
    the same for models with sliding windows.
    """

    num_groups = 1

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, enable_caching)
        self.accounts = self.pool.accounts
        self.enable_caching = enable_caching
        self._cold_starts = cold.ColdStarts(block_size)
        #: Prompt tokens looked up, and found, since the start.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks of one sequence that grows to `num_tokens`, at most `chunk` a step."""
        return self.blocks_for(num_tokens)

    def capacity(self, num_blocks: int, chunk: int, longest: int = 0) -> int:
        """Tokens of the longest sequence that can run in so many blocks, at most `chunk` a step.

        Where only windows are kept there may be no end to it; then `longest`, the model's context.
        """
        return num_blocks * self.block_size

    def account_of(self, sequence: Sequence) -> Account:
        """Who pays for the sequence's blocks."""
        return self.accounts.of(sequence.request.message.tenant)

    def find_cached_prefix(self, sequence: Sequence) -> Tables:
        """The longest run of cached blocks that the sequence's tokens begin with, by group.

        At least one token is always left to compute, because its logits are needed. Nothing is
        allocated; the blocks may be evicted until `allocate` touches them.
        """
        if not self.enable_caching or not sequence.reads_cache:
            return [[] for _ in range(self.num_groups)]
        self.update_hashes(sequence)
        most = (sequence.num_tokens - 1) // self.block_size
        return self._find(sequence.block_hashes, most)

    def _find(self, hashes: list[bytes], most: int) -> Tables:
        """Cached blocks of the first `most` hashes at most."""
        found: list[Block] = []
        for block_hash in hashes[:most]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            found.append(block)
        return [found]

    def why_cold(self, sequence: Sequence) -> str:
        """Why `find_cached_prefix` found nothing; ask once a sequence, when it starts."""
        if not self.enable_caching:
            return cold.CACHING_OFF
        if not sequence.reads_cache:
            return cold.ALL_TOKENS_NEEDED
        return self._cold_starts.reason(sequence)

    def update_hashes(self, sequence: Sequence) -> None:
        """Hash those of the sequence's full blocks that are not hashed yet."""
        size, hashes, tokens = self.block_size, sequence.block_hashes, sequence.token_ids
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            parent, extra = (hashes[-1], b"") if hashes else (ROOT, sequence.extra_key)
            hashes.append(hash_block(parent, tokens[start : start + size], extra))

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks of a running sequence that none of its coming tokens sees."""

    def can_allocate(
        self, sequence: Sequence, num_tokens: int, prefix: Tables | None = None
    ) -> bool:
        """Whether `allocate` with the same arguments would succeed."""
        room = self.pool.available_to(self.account_of(sequence))
        return self.needed(sequence, num_tokens, prefix) <= room

    def needed(self, sequence: Sequence, num_tokens: int, prefix: Tables | None = None) -> int:
        """How many blocks `allocate` with the same arguments would take from the free list."""
        missing = self.blocks_for(num_tokens) - len(sequence.blocks)
        if prefix:
            found = prefix[0]
            missing += sum(block.ref_count == 0 for block in found) - len(found)
        return missing

    def allocate(
        self, sequence: Sequence, num_tokens: int, prefix: Tables | None = None
    ) -> Tables | None:
        """Make room for the sequence's first `num_tokens` tokens.

        Args:
            sequence: its tables are extended by `prefix` and new blocks.
            num_tokens: tokens whose KV will be in the cache after this step.
            prefix: what `find_cached_prefix` returned, for a sequence without blocks; else None.

        Returns the new blocks by group, the prefix left out; None when there is none. Raises
        RuntimeError when too few blocks are free: callers ask `can_allocate` first.
        """
        account = self.account_of(sequence)
        if prefix and prefix[0]:
            # Before allocating, lest the allocation evict what was just found.
            self.pool.touch(prefix[0], account)
            sequence.blocks.extend(prefix[0])
        missing = self.blocks_for(num_tokens) - len(sequence.blocks)
        fresh = self.pool.allocate(missing, account) if missing > 0 else None
        if fresh:
            sequence.blocks.extend(fresh)
        self._cache_full_blocks(sequence, num_tokens)
        return [fresh] if fresh else None

    def free(self, sequence: Sequence) -> None:
        """Give all of the sequence's blocks back; what is cached stays cached until evicted."""
        self.pool.free(sequence.blocks, self.account_of(sequence))
        sequence.blocks.clear()
        sequence.num_cached_blocks = 0

    def forget(self, sequence: Sequence, num_tokens: int) -> None:
        """Uncache the sequence's blocks from token `num_tokens` on: their content never came."""
        for block in sequence.blocks[num_tokens // self.block_size :]:
            self.pool.uncache(block)

    def total(self, sequence: Sequence, num_tokens: int, prefix: Tables | None = None) -> int:
        """Blocks in the sequence's tables after `allocate` with the same arguments."""
        return self.blocks_for(num_tokens)

    def forget_all(self, sequence: Sequence) -> None:
        """Uncache all that a sequence, now without blocks, has offered to the cache."""
        for block_hash in sequence.block_hashes:
            self.pool.uncache_all(block_hash)

    def tables(self, sequence: Sequence) -> Tables:
        """The sequence's block tables, one a group."""
        return [sequence.blocks]

    def _cache_full_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Cache blocks that this step fills; later requests of the same step may already hit them.

        That is sound because a step writes all KV of a layer before any attention reads it.
        """
        if not self.enable_caching:
            return
        full = min(num_tokens, sequence.num_tokens) // self.block_size
        if full <= sequence.num_cached_blocks:
            return
        self.update_hashes(sequence)
        self._cache_range(sequence, sequence.num_cached_blocks, full)
        sequence.num_cached_blocks = full

    def _cache_range(self, sequence: Sequence, first: int, end: int) -> None:
        """Cache the sequence's blocks [first, end) under their hashes."""
        for index in range(first, end):
            block = sequence.blocks[index]
            if block.block_hash is None:
                self.pool.cache(block, sequence.block_hashes[index])
