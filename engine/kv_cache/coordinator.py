"""`KVCacheCoordinator`: what the scheduler asks of the KV cache, for all groups of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from engine.kv_cache import prefix_cache as cold
from engine.kv_cache.block import TenantQuota
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.kv_cache.prefix_cache import BlockHashes, HitRequirement, group_key, longest_common_hit
from engine.kv_cache.single_type_managers import (
    BlockTable,
    FullAttentionManager,
    SingleTypeManager,
    SlidingWindowManager,
)

#: Block tables of one sequence, one a KV cache group, all of the same length.
BlockTables = list[BlockTable]


class KVCacheCoordinator(ABC):
    """The managers of a model's KV cache groups over their common pool.

    Sequences are known by their ids alone; one has block tables from its first `allocate` until
    `free`. `docs/prefix-caching.md` walks through the operations with numbers.
    """

    def __init__(
        self,
        pool: BlockPool,
        managers: Sequence[SingleTypeManager],
        block_size: int,
        enable_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.quotas = pool.quotas
        self.managers = list(managers)
        self.windows = tuple(manager.window for manager in managers)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._trims = any(self.windows)
        #: Sequence id -> how many blocks of its tables, from the first, were offered to the cache.
        self._num_cached: dict[int, int] = {}
        self._cold_starts = cold.PrefixMissTracker(block_size)
        #: Prompt tokens looked up, and found, since the start.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    # -- sizes --------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def max_blocks_per_sequence(self, num_tokens: int, chunk: int) -> int:
        """Most blocks of one sequence that grows to `num_tokens`, at most `chunk` a step."""
        return sum(manager.most_blocks(num_tokens, chunk) for manager in self.managers)

    def max_sequence_tokens(self, num_blocks: int, chunk: int, longest: int = 0) -> int:
        """Tokens of the longest sequence that can run in so many blocks, at most `chunk` a step.

        Where only windows are kept there may be no end to it; then `longest`, the model's context.
        """
        low, high = 0, max(num_blocks * self.block_size, longest)
        while low < high:
            middle = (low + high + 1) // 2
            if self.max_blocks_per_sequence(middle, chunk) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    # -- prefixes -----------------------------------------------------------------------------

    def get_computed_blocks(self, token_ids: list[int], hashes: BlockHashes) -> BlockTables:
        """The longest run of cached blocks that a sequence's tokens begin with, by group.

        At least one token is always left to compute, because its logits are needed. Nothing is
        allocated; the blocks may be evicted until `allocate` touches them.
        """
        if not self.enable_caching:
            return self.empty_blocks()
        values = hashes.hash_full_blocks(token_ids, self.block_size)
        return self._find(values[: (len(token_ids) - 1) // self.block_size])

    def empty_blocks(self) -> BlockTables:
        """The prefix of a sequence that must compute all of its tokens."""
        return [[] for _ in self.managers]

    @abstractmethod
    def _find(self, hashes: list[bytes]) -> BlockTables:
        """Cached blocks of the longest prefix of these that is a hit in every group."""

    def miss_reason(self, token_ids: list[int], hashes: BlockHashes, *, reads_cache: bool) -> str:
        """Why no prefix was found; ask once a sequence, when it starts.

        `reads_cache`: whether one was looked for at all.
        """
        if not self.enable_caching:
            return cold.CACHING_OFF
        return (
            self._cold_starts.miss_reason(token_ids, hashes)
            if reads_cache
            else cold.ALL_TOKENS_NEEDED
        )

    # -- blocks of a sequence -------------------------------------------------------------------

    def get_block_tables(self, seq_id: int) -> BlockTables:
        """The block tables of a sequence that holds blocks."""
        return [manager.tables[seq_id] for manager in self.managers]

    def can_allocate(
        self,
        seq_id: int,
        quota: TenantQuota,
        num_computed: int,
        num_new: int,
        prefix: BlockTables | None = None,
    ) -> bool:
        """Whether `allocate` with the same arguments would succeed."""
        room = self.pool.num_available_blocks(quota)
        return self.needed(seq_id, num_computed, num_new, prefix) <= room

    def needed(
        self, seq_id: int, num_computed: int, num_new: int, prefix: BlockTables | None = None
    ) -> int:
        """How many blocks `allocate` with the same arguments would take from the free list."""
        total = -(-(num_computed + num_new) // self.block_size)
        needed = 0
        for group, manager in enumerate(self.managers):
            found = prefix[group] if prefix is not None else None
            needed += manager.num_blocks_to_allocate(seq_id, total, num_computed, found)
        return needed

    def total(
        self, seq_id: int, num_computed: int, num_new: int, prefix: BlockTables | None = None
    ) -> int:
        """Blocks in the sequence's tables after `allocate`, null blocks left out."""
        total, held = self.blocks_for(num_computed + num_new), 0
        for group, manager in enumerate(self.managers):
            found = prefix[group] if prefix is not None else None
            held += manager.num_blocks_after(seq_id, total, num_computed, found)
        return held

    def allocate(
        self,
        seq_id: int,
        quota: TenantQuota,
        num_computed: int,
        num_new: int,
        prefix: BlockTables | None = None,
    ) -> BlockTables | None:
        """Make room for a sequence's next tokens.

        Args:
            seq_id: the sequence.
            quota: of its tenant, who pays.
            num_computed: its tokens whose KV is there; with `prefix`, that many tokens.
            num_new: tokens after those, whose KV comes with the next step.
            prefix: what `get_computed_blocks` returned, for a sequence without blocks; else None.

        Returns the new blocks by group, the prefix left out; None when there is none. Raises
        RuntimeError when too few blocks are free: callers ask `can_allocate` first.
        """
        managers = self.managers
        if prefix and prefix[0]:
            # Before allocating, lest the allocation evict what was just found.
            for manager, found in zip(managers, prefix, strict=True):
                manager.adopt_prefix(seq_id, found, quota)
        total = -(-(num_computed + num_new) // self.block_size)
        if total <= len(managers[0].tables.get(seq_id, ())):
            return None
        return [
            manager.allocate_new_blocks(seq_id, total, num_computed, quota) for manager in managers
        ]

    def cache_full_blocks(
        self, seq_id: int, token_ids: list[int], hashes: BlockHashes, num_tokens: int
    ) -> None:
        """Cache blocks that this step fills; later requests of the same step may already hit them.

        That is sound because a step writes all KV of a layer before any attention reads it.

        Args:
            seq_id: the sequence.
            token_ids: its tokens that are known.
            hashes: of their blocks.
            num_tokens: whose KV is in the cache after the step; some may not be known yet.
        """
        if not self.enable_caching:
            return
        first = self._num_cached.get(seq_id, 0)
        end = min(num_tokens, len(token_ids)) // self.block_size
        if end <= first:
            return
        values = hashes.hash_full_blocks(token_ids, self.block_size)
        for manager in self.managers:
            manager.cache(seq_id, values, first, end)
        self._num_cached[seq_id] = end

    def free_skipped_blocks(self, seq_id: int, quota: TenantQuota, num_computed: int) -> None:
        """Free the blocks of a running sequence that none of its coming tokens sees."""
        if self._trims:
            for manager in self.managers:
                manager.remove_skipped_blocks(seq_id, num_computed, quota)

    def free(self, seq_id: int, quota: TenantQuota) -> None:
        """Give all of a sequence's blocks back; what is cached stays cached until evicted."""
        for manager in self.managers:
            manager.free(seq_id, quota)
        self._num_cached.pop(seq_id, None)

    def uncache_from(self, seq_id: int, hashes: BlockHashes, num_tokens: int) -> None:
        """Uncache a sequence's blocks from token `num_tokens` on: their content never came."""
        cached = hashes.values[: self._num_cached.get(seq_id, 0)]
        for manager in self.managers:
            manager.uncache_from(seq_id, cached, num_tokens // self.block_size)

    def has_shared_blocks(self, seq_id: int, num_tokens: int) -> bool:
        """Whether others use a sequence's blocks from token `num_tokens` on, too."""
        first = num_tokens // self.block_size
        return any(
            block.ref_count > 1
            for manager in self.managers
            for block in manager.tables.get(seq_id, [])[first:]
        )

    def uncache_all(self, hashes: BlockHashes) -> None:
        """Uncache all that a sequence, now without blocks, has offered to the cache."""
        for block_hash in hashes.values:
            for manager in self.managers:
                self.pool.uncache_all(block_hash + manager.suffix)

    def check_integrity(self, tenants: Mapping[int, str]) -> None:
        """Raise RuntimeError unless the pool's books balance.

        `tenants`: the sequences that may hold blocks, and whose they are.
        """
        for manager in self.managers:
            if stray := manager.tables.keys() - tenants.keys():
                raise RuntimeError(f"Sequences that don't run hold blocks: {sorted(stray)}.")
        self.pool.check_integrity(
            (tenants[seq_id], table)
            for manager in self.managers
            for seq_id, table in manager.tables.items()
        )


# -- The coordinators: for models whose layers all attend alike, and for those of several kinds.


def make_coordinator(
    layout: KVCacheConfig | None, num_blocks: int, block_size: int, enable_caching: bool = True
) -> KVCacheCoordinator:
    """The coordinator that fits a layout; no layout: full attention everywhere."""
    pool = BlockPool(num_blocks, enable_caching)
    windows = layout.windows if layout is not None else (0,)
    # A single group's hashes need no group.
    suffixes = [group_key(group) if len(windows) > 1 else b"" for group in range(len(windows))]
    managers: list[SingleTypeManager] = [
        SlidingWindowManager(pool, block_size, window, suffix)
        if window
        else FullAttentionManager(pool, block_size, suffix)
        for window, suffix in zip(windows, suffixes, strict=True)
    ]
    kind = HybridKVCacheCoordinator if len(managers) > 1 else UnitaryKVCacheCoordinator
    return kind(pool, managers, block_size, enable_caching)


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One KV cache group."""

    def max_sequence_tokens(self, num_blocks: int, chunk: int, longest: int = 0) -> int:
        """Tokens of the longest sequence that can run in so many blocks; see the base."""
        if not self._trims:
            return num_blocks * self.block_size
        return super().max_sequence_tokens(num_blocks, chunk, longest)

    def _find(self, hashes: list[bytes]) -> BlockTables:
        """See the base."""
        return [self.managers[0].longest_prefix(hashes)]


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several KV cache groups: full attention and sliding windows, or windows of several lengths.

    All tables of a sequence have the same length. A block's key in the pool is its hash and its
    group: the same tokens are cached, and evicted, group by group.
    """

    def __init__(
        self,
        pool: BlockPool,
        managers: Sequence[SingleTypeManager],
        block_size: int,
        enable_caching: bool = True,
    ) -> None:
        super().__init__(pool, managers, block_size, enable_caching)
        self._types = _attention_types(self.managers)

    def _find(self, hashes: list[bytes]) -> BlockTables:
        """See the base. Blocks that the next token doesn't see are left out."""
        lookup = self.pool.get_cached_block
        hit = longest_common_hit(
            self._types,
            len(hashes),
            lambda index, suffix: lookup(hashes[index] + suffix) is not None,
        )
        return [manager.cached_blocks_of(hashes[:hit]) for manager in self.managers]


def _attention_types(managers: Sequence[SingleTypeManager]) -> list[HitRequirement]:
    """The groups of equal window together, full attention first."""
    by_window: dict[int, list[SingleTypeManager]] = {}
    for manager in managers:
        by_window.setdefault(manager.window, []).append(manager)
    return [
        HitRequirement(
            alike[0].attention_type.num_required_blocks, tuple(each.suffix for each in alike)
        )
        for _, alike in sorted(by_window.items())
    ]
