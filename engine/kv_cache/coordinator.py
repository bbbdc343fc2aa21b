"""`KVCacheCoordinator`: the scheduler's interface to the KV cache, for all groups of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.kv_cache import prefix_cache
from engine.kv_cache.block import TenantQuota
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_events import KVEventGroup, KVEventRecorder
from engine.kv_cache.prefix_cache import BlockHashes, CacheableSequence
from engine.kv_cache.single_type_managers import (
    BlockTable,
    CrossAttentionManager,
    SingleTypeManager,
)
from engine.kv_cache.state_manager import StateManager

#: Number of recent prefix cache lookups for the log's hit rate, as in vLLM.
NUM_RECENT_LOOKUPS = 1_000

#: Block tables of one sequence, one per KV cache group; their lengths may differ.
BlockTables = list[BlockTable]


class CachedPrefix(NamedTuple):
    """Cached blocks that match a sequence's first tokens.

    Attributes:
        num_tokens: number of tokens that need not be computed.
        blocks: by KV cache group.
        branch: number of tokens whose keys and values are cached; more than `num_tokens` if no
            state is cached at their end.
        num_states: number of encoder states that the sequence attends to.
    """

    num_tokens: int
    blocks: BlockTables
    branch: int = 0
    num_states: int = 0


class KVCacheCoordinator(ABC):
    """The managers of a model's KV cache groups, over their common pool.

    A sequence has block tables from its first `allocate_slots` until `free`.
    `docs/prefix-caching.md` walks through the operations with numbers.
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
        self._has_windows = any(self.windows)
        self._cross = [
            manager for manager in self.managers if isinstance(manager, CrossAttentionManager)
        ]
        states = [manager for manager in managers if isinstance(manager, StateManager)]
        #: Manager of the layers that carry a state; None: there are none.
        self.states = states[0] if states else None
        #: Sequence id -> number of its first blocks that have been cached.
        self._num_cached: dict[int, int] = {}
        self._prefix_misses = prefix_cache.PrefixMissTracker(block_size)
        #: Collects changes of the prefix cache; None: they aren't recorded.
        self.events: KVEventRecorder | None = None
        #: Prompt tokens looked up in the cache, and those that hit, since the start.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        #: Both totals before each of the recent lookups.
        self._recent_totals: deque[tuple[int, int]] = deque(maxlen=NUM_RECENT_LOOKUPS)

    def record_lookup(self, num_tokens: int, num_hits: int) -> None:
        """Count the tokens of a sequence that starts, and the cached ones among them."""
        self._recent_totals.append((self.num_query_tokens, self.num_hit_tokens))
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += num_hits

    def reset_lookups(self) -> None:
        """Reset the counts of `record_lookup`."""
        self.num_query_tokens = self.num_hit_tokens = 0
        self._recent_totals.clear()

    @property
    def recent_hit_rate(self) -> float:
        """Hits per token of the last `NUM_RECENT_LOOKUPS` lookups, in [0, 1]."""
        if not self._recent_totals:
            return 0.0
        queries, hits = self._recent_totals[0]
        return (self.num_hit_tokens - hits) / max(1, self.num_query_tokens - queries)

    def max_blocks_per_sequence(self, num_tokens: int, chunk: int) -> int:
        """Maximum number of blocks of a sequence that grows to `num_tokens` by `chunk` per step."""
        return sum(
            manager.group.max_blocks(num_tokens, chunk, self.block_size)
            for manager in self.managers
        )

    def max_sequence_tokens(self, num_blocks: int, chunk: int, longest: int = 0) -> int:
        """Length of the longest sequence that can run in `num_blocks`, by `chunk` tokens per step.

        Without bound if all layers have windows; then `longest`, the model's context.
        """
        low, high = 0, max(num_blocks * self.block_size, longest)
        while low < high:
            middle = (low + high + 1) // 2
            if self.max_blocks_per_sequence(middle, chunk) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def get_computed_blocks(self, sequence: CacheableSequence) -> CachedPrefix:
        """The longest cached prefix of a sequence.

        At least one token is always left to compute, because its logits are needed. Nothing is
        allocated; the blocks may be evicted until `allocate_slots` adopts them.
        """
        if not self.enable_caching:
            return self.empty_prefix(sequence)
        token_ids = sequence.token_ids
        hashes = sequence.block_hashes.hash_full_blocks(token_ids, self.block_size)
        hashes = hashes[: (len(token_ids) - 1) // self.block_size]
        num_blocks, tables, branch = self._longest_prefix(hashes)
        tables += self._cached_states(sequence)
        size, num_states = self.block_size, self._num_states(sequence)
        return CachedPrefix(num_blocks * size, tables, branch * size, num_states)

    def _cached_states(self, sequence: CacheableSequence) -> BlockTables:
        """Cached blocks of the encoder states that a sequence attends to, by cross-attention
        group.
        """
        tables = [
            manager.cached_states(sequence.encoder_key, sequence.num_encoder_states)
            for manager in self._cross
        ]
        return tables if all(tables) else [[] for _ in tables]

    def needs_encoding(self, prefix: CachedPrefix) -> bool:
        """Whether a sequence that starts with a prefix must run the encoder."""
        return bool(self._cross) and not prefix.blocks[-1]

    def empty_prefix(self, sequence: CacheableSequence | None = None) -> CachedPrefix:
        """The prefix of a sequence that must compute all of its tokens; encoder states may still be
        cached.
        """
        if sequence is None:
            return CachedPrefix(0, [[] for _ in self.managers])
        states = self._cached_states(sequence)
        tables: BlockTables = [[] for _ in self.managers[len(states) :]]
        return CachedPrefix(0, tables + states, num_states=self._num_states(sequence))

    def _num_states(self, sequence: CacheableSequence) -> int:
        return sequence.num_encoder_states if self._cross else 0

    @abstractmethod
    def _longest_prefix(self, hashes: list[bytes]) -> tuple[int, BlockTables, int]:
        """The longest prefix of these hashes that is a hit in every group: its number of hashes,
        its cached blocks, and the number of hashes that would hit if their state were cached, too.
        """

    def is_cached(self, block_hash: bytes) -> bool:
        """Whether any group has a block with this hash. May be called in any thread."""
        return any(manager.pool.is_cached(block_hash + manager.suffix) for manager in self.managers)

    def miss_reason(
        self, sequence: CacheableSequence, prefix: CachedPrefix, *, reads_cache: bool
    ) -> str:
        """Why a sequence has no cached prefix; called once per sequence, when it starts.

        Args:
            sequence: the sequence.
            prefix: the prefix that was used instead.
            reads_cache: whether a prefix was looked up at all.
        """
        if not self.enable_caching:
            return prefix_cache.CACHING_OFF
        if not reads_cache:
            return prefix_cache.ALL_TOKENS_NEEDED
        reason = self._prefix_misses.miss_reason(sequence.token_ids, sequence.block_hashes)
        return prefix_cache.NO_STATE if prefix.branch else reason

    def get_block_tables(self, seq_id: int) -> BlockTables:
        """The block tables of a sequence that holds blocks."""
        return [manager.tables[seq_id] for manager in self.managers]

    def allocate_slots(
        self,
        sequence: CacheableSequence,
        quota: TenantQuota,
        num_computed: int,
        num_new: int,
        prefix: CachedPrefix | None = None,
        *,
        lookahead: bool = False,
    ) -> BlockTables | None:
        """Allocate the blocks of a sequence's next tokens, and cache those that they fill.

        Later sequences of the same step may hit these blocks at once. That is safe because a step
        writes all KV of a layer before any attention reads it. Blocks that have left a window are
        freed first, even if the allocation fails afterwards.

        Args:
            sequence: the sequence.
            quota: the tenant's quota, which is charged.
            num_computed: number of tokens whose KV is computed; with `prefix`, the prefix and the
                tokens that the step loads after it.
            num_new: number of tokens after those that the next step computes; some may not be known
                yet.
            prefix: the result of `get_computed_blocks`, for a sequence without blocks; else None.
            lookahead: the last tokens are drafts, which may be rejected: no block is cached, none
                leaves a window, and states before each draft are kept until `StateManager.rewind`.

        Returns the new blocks by group, without the prefix, and an empty list if the sequence needs
        none; None, with nothing allocated, if the tenant can't get enough.
        """
        seq_id, managers = sequence.seq_id, self.managers
        if prefix is None and not lookahead:
            self.free_skipped_blocks(seq_id, quota, num_computed)
        num_needed = self.num_blocks_to_allocate(seq_id, num_computed, num_new, prefix)
        if num_needed > self.pool.num_available_blocks(quota):
            return None
        if lookahead and self.states is not None:
            if num_new > self.states.pool.num_free_blocks:
                return None
            self.states.keep_until_verified(sequence, quota, num_computed, num_new)
        if prefix is not None and any(prefix.blocks):
            # Adopt the prefix first, so that new blocks don't evict it.
            for manager, cached_blocks in zip(managers, prefix.blocks, strict=True):
                # The connector loads a later state into the block; a copy would overwrite it.
                if manager is not self.states or num_computed == prefix.num_tokens:
                    manager.adopt_prefix(seq_id, cached_blocks, quota)
        blocks: BlockTables = []
        if num_needed:
            blocks = [
                manager.allocate_new_blocks(
                    seq_id,
                    self._length(manager, num_computed + num_new, prefix),
                    num_computed,
                    quota,
                )
                for manager in managers
            ]
        if prefix is not None and self.enable_caching:
            for cross in self._cross:
                cross.cache_states(seq_id, sequence.encoder_key)
        if not lookahead:
            self.cache_full_blocks(sequence, num_computed + num_new)
            if self.states is not None and self.enable_caching:
                if prefix is not None:
                    self.states.start_sequence(sequence, num_computed, prefix.branch)
                self.states.schedule_checkpoints(
                    sequence, quota, num_computed, num_computed + num_new
                )
        return blocks

    def can_allocate(
        self,
        seq_id: int,
        quota: TenantQuota,
        num_computed: int,
        num_new: int,
        prefix: CachedPrefix | None = None,
    ) -> bool:
        """Whether the tenant can get the blocks that `allocate_slots` would take."""
        num_needed = self.num_blocks_to_allocate(seq_id, num_computed, num_new, prefix)
        return num_needed <= self.pool.num_available_blocks(quota)

    def num_blocks_to_allocate(
        self, seq_id: int, num_computed: int, num_new: int, prefix: CachedPrefix | None = None
    ) -> int:
        """Number of free blocks that `allocate_slots` would take."""
        num_tokens, num_needed = num_computed + num_new, 0
        for group, manager in enumerate(self.managers):
            blocks = prefix.blocks[group] if prefix is not None else None
            length = self._length(manager, num_tokens, prefix)
            num_needed += manager.num_blocks_to_allocate(seq_id, length, num_computed, blocks)
        return num_needed

    def num_blocks_after(
        self, seq_id: int, num_computed: int, num_new: int, prefix: CachedPrefix | None = None
    ) -> int:
        """Number of blocks in a sequence's tables after `allocate_slots`, without null blocks."""
        num_tokens, num_blocks = num_computed + num_new, 0
        for group, manager in enumerate(self.managers):
            blocks = prefix.blocks[group] if prefix is not None else None
            length = self._length(manager, num_tokens, prefix)
            num_blocks += manager.num_blocks_after(seq_id, length, num_computed, blocks)
        return num_blocks

    def _length(
        self, manager: SingleTypeManager, num_tokens: int, prefix: CachedPrefix | None
    ) -> int:
        """Number of tokens for which a group needs blocks: of encoder states, when a sequence
        starts, where it attends to these.
        """
        if manager not in self._cross:
            return num_tokens
        return 0 if prefix is None else prefix.num_states

    def cache_full_blocks(self, sequence: CacheableSequence, num_tokens: int) -> None:
        """Cache the blocks that a sequence's first `num_tokens` tokens fill, as far as the tokens
        are known.
        """
        if not self.enable_caching:
            return
        seq_id, token_ids = sequence.seq_id, sequence.token_ids
        first = self._num_cached.get(seq_id, 0)
        end = min(num_tokens, len(token_ids)) // self.block_size
        if end <= first:
            return
        hashes = sequence.block_hashes.hash_full_blocks(token_ids, self.block_size)
        for manager in self.managers:
            manager.cache(seq_id, hashes, first, end)
            if self.events is not None and manager.group.kind in ("full", "window"):
                self._record_stored(self.events, manager, sequence, first, end)
        self._num_cached[seq_id] = end

    def record_events(self) -> None:
        """Collect events from now on; there are none for blocks that are cached already."""
        self.events = KVEventRecorder(self.block_size)
        for pool in self._pools:
            pool.on_uncached = self.events.record_removed

    def _record_stored(
        self,
        events: KVEventRecorder,
        manager: SingleTypeManager,
        sequence: CacheableSequence,
        first: int,
        end: int,
    ) -> None:
        """Record events for those of a sequence's blocks [first, end) that have just been
        cached.
        """
        hashes, suffix = sequence.block_hashes.values, manager.suffix
        indices = [
            index
            for index in range(first, end)
            if not events.is_stored(key := hashes[index] + suffix)
            and manager.pool.get_cached_block(key) is not None
        ]
        index = self.managers.index(manager) if len(self.managers) > 1 else None
        group = KVEventGroup(index, manager.group.kind, manager.group.window)
        events.record_stored(hashes, suffix, indices, sequence.token_ids, group, sequence.lora_name)

    def free_skipped_blocks(self, seq_id: int, quota: TenantQuota, num_computed: int) -> None:
        """Free blocks of a running sequence that none of its later tokens attends to."""
        if self._has_windows:
            for manager in self.managers:
                manager.remove_skipped_blocks(seq_id, num_computed, quota)

    def free(self, seq_id: int, quota: TenantQuota) -> None:
        """Free all of a sequence's blocks; cached content stays until it's evicted."""
        for manager in self.managers:
            manager.free(seq_id, quota)
        self._num_cached.pop(seq_id, None)

    def move_tables(self, seq_id: int, key: int) -> None:
        """Keep a sequence's blocks, of which none is cached yet but its prefix, under another key:
        it starts anew without them.
        """
        for manager in self.managers:
            manager.tables[key] = manager.tables.pop(seq_id)

    def uncache_from(self, seq_id: int, hashes: BlockHashes, num_tokens: int) -> None:
        """Uncache a sequence's blocks from token `num_tokens` on: they were never written."""
        cached = hashes.values[: self._num_cached.get(seq_id, 0)]
        for manager in self.managers:
            manager.uncache_from(seq_id, cached, num_tokens // self.block_size)

    def get_state_blocks(self, seq_id: int) -> list[int]:
        """Ids of the blocks of a sequence's encoder states, all cross-attention groups
        concatenated.
        """
        return [block.block_id for cross in self._cross for block in cross.tables[seq_id]]

    def uncache_states(self, sequence: CacheableSequence) -> None:
        """Uncache the encoder states that a sequence attends to: they were never written."""
        for cross in self._cross:
            cross.uncache_states(sequence.encoder_key, sequence.num_encoder_states)

    def has_shared_blocks(self, seq_id: int, num_tokens: int) -> bool:
        """Whether other sequences share a sequence's blocks from token `num_tokens` on."""
        first = num_tokens // self.block_size
        return any(
            block.ref_count > 1
            for manager in self.managers
            for block in manager.tables.get(seq_id, [])[0 if manager in self._cross else first :]
        )

    def uncache_all(self, hashes: BlockHashes) -> None:
        """Uncache all blocks cached by a sequence that holds no blocks any more."""
        if self.states is not None:
            self.states.drop_pending(hashes)
        for block_hash in hashes.values:
            for manager in self.managers:
                manager.pool.uncache_all(block_hash + manager.suffix)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content; False, without effect, while any block is in use."""
        self.start_step()
        pools = self._pools
        if any(pool.num_free_blocks != pool.num_blocks for pool in pools):
            return False
        if self.events is not None:
            self.events.record_cleared()
        return all(pool.reset_prefix_cache() for pool in pools)

    @property
    def _pools(self) -> list[BlockPool]:
        """The common pool, and the pool of states."""
        return list(dict.fromkeys([self.pool, *(manager.pool for manager in self.managers)]))

    def record_request(
        self, tenant: str, weight: float, reserved_fraction: float, max_fraction: float
    ) -> TenantQuota:
        """Update a tenant's share of each pool at a request; returns its quota of the common
        pool.
        """
        for pool in self._pools:
            pool.quotas.record_request(tenant, weight, reserved_fraction, max_fraction)
        return self.quotas.get(tenant)

    def start_step(self) -> None:
        """Begin planning a step: cache the checkpoints of earlier steps, which are written by
        then.
        """
        if self.states is not None:
            self.states.cache_written_checkpoints()

    def check_integrity(self, tenants: Mapping[int, str]) -> None:
        """Raise RuntimeError unless the pool's accounting is consistent.

        `tenants`: the sequences that may hold blocks, with their tenants.
        """
        self.start_step()
        for manager in self.managers:
            if stray := manager.tables.keys() - tenants.keys():
                raise RuntimeError(f"Sequences that don't run hold blocks: {sorted(stray)}.")
        for pool in self._pools:
            pool.check_integrity(
                (tenants[seq_id], table)
                for manager in self.managers
                if manager.pool is pool
                for seq_id, table in manager.blocks_by_sequence()
            )
