"""`KVCacheManager`: gives sequences their blocks, finds cached prefixes, caches full blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kv_cache.block import Block
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.hashing import ROOT, hash_block

if TYPE_CHECKING:
    from engine.scheduler.sequence import Sequence


class KVCacheManager:
    """Block tables of all sequences over one `BlockPool`.

    A sequence's table is `sequence.blocks`; it only ever grows at the end, until it is freed whole.
    `docs/prefix-caching.md` walks through the operations with numbers.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, enable_caching)
        self.enable_caching = enable_caching
        #: Prompt tokens looked up, and found, since the start.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def find_cached_prefix(self, sequence: Sequence) -> list[Block]:
        """The longest run of cached blocks that the sequence's tokens begin with.

        At least one token is always left to compute, because its logits are needed. Nothing is
        allocated; the blocks may be evicted until `allocate` touches them.
        """
        if not self.enable_caching or sequence.wants_prompt_logprobs:
            return []
        self.update_hashes(sequence)
        most = (sequence.num_tokens - 1) // self.block_size
        found: list[Block] = []
        for block_hash in sequence.block_hashes[:most]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def update_hashes(self, sequence: Sequence) -> None:
        """Hash those of the sequence's full blocks that are not hashed yet."""
        size, hashes, tokens = self.block_size, sequence.block_hashes, sequence.token_ids
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            parent, extra = (hashes[-1], b"") if hashes else (ROOT, sequence.extra_key)
            hashes.append(hash_block(parent, tokens[start : start + size], extra))

    def can_allocate(self, sequence: Sequence, num_tokens: int, prefix: list[Block]) -> bool:
        """Whether `allocate` with the same arguments would succeed."""
        revived = sum(block.ref_count == 0 for block in prefix)
        return self._missing(sequence, num_tokens, prefix) <= self.pool.num_free - revived

    def allocate(self, sequence: Sequence, num_tokens: int, prefix: list[Block]) -> list[Block]:
        """Make room for the sequence's first `num_tokens` tokens; returns the added blocks.

        Args:
            sequence: its table is extended by `prefix` and new blocks.
            num_tokens: tokens whose KV will be in the cache after this step.
            prefix: what `find_cached_prefix` returned, for a sequence without blocks; else [].

        Raises RuntimeError when too few blocks are free: callers ask `can_allocate` first.
        """
        missing = self._missing(sequence, num_tokens, prefix)
        if prefix:
            # Before allocating, lest the allocation evict what was just found.
            self.pool.touch(prefix)
            sequence.blocks.extend(prefix)
        fresh = self.pool.allocate(missing) if missing > 0 else []
        sequence.blocks.extend(fresh)
        self._cache_full_blocks(sequence, num_tokens)
        return prefix + fresh if prefix else fresh

    def free(self, sequence: Sequence) -> None:
        """Give all of the sequence's blocks back; what is cached stays cached until evicted."""
        self.pool.free(sequence.blocks)
        sequence.blocks.clear()
        sequence.num_cached_blocks = 0

    def forget(self, sequence: Sequence, num_tokens: int) -> None:
        """Uncache the sequence's blocks from token `num_tokens` on: their content never came."""
        for block in sequence.blocks[num_tokens // self.block_size :]:
            self.pool.uncache(block)

    def _missing(self, sequence: Sequence, num_tokens: int, prefix: list[Block]) -> int:
        return self.blocks_for(num_tokens) - len(sequence.blocks) - len(prefix)

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
        for index in range(sequence.num_cached_blocks, full):
            block = sequence.blocks[index]
            if block.block_hash is None:
                self.pool.cache(block, sequence.block_hashes[index])
        sequence.num_cached_blocks = full
