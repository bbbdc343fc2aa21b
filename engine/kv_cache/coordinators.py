"""Coordinators of one KV cache group and of several, and which of them a layout needs."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.coordinator import BlockTables, KVCacheCoordinator
from engine.kv_cache.kv_cache_config import KVCacheConfig, KVCacheKind, single_group_config
from engine.kv_cache.prefix_cache import HitRequirement, group_key, longest_common_hit
from engine.kv_cache.single_type_managers import (
    CrossAttentionManager,
    FullAttentionManager,
    SingleTypeManager,
    SlidingWindowManager,
)
from engine.kv_cache.state_manager import StateManager

MANAGERS: dict[KVCacheKind, type[SingleTypeManager]] = {
    "full": FullAttentionManager,
    "window": SlidingWindowManager,
    "cross": CrossAttentionManager,
    "state": StateManager,
}


def make_coordinator(
    layout: KVCacheConfig | None, num_blocks: int, block_size: int, enable_caching: bool = True
) -> KVCacheCoordinator:
    """The coordinator of a layout; None: one group with full attention."""
    pool = BlockPool(num_blocks, enable_caching)
    groups = (layout or single_group_config(1)).groups
    # With a single group its index isn't part of the hashes.
    suffixes = [group_key(index) if len(groups) > 1 else b"" for index in range(len(groups))]
    managers = [
        MANAGERS[group.kind](
            BlockPool(group.num_blocks, enable_caching) if group.num_blocks else pool,
            block_size,
            group,
            suffix,
        )
        for group, suffix in zip(groups, suffixes, strict=True)
    ]
    kind = HybridKVCacheCoordinator if len(managers) > 1 else UnitaryKVCacheCoordinator
    return kind(pool, managers, block_size, enable_caching)


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One KV cache group."""

    def max_sequence_tokens(self, num_blocks: int, chunk: int, longest: int = 0) -> int:
        if not self._has_windows:
            return num_blocks * self.block_size
        return super().max_sequence_tokens(num_blocks, chunk, longest)

    def _longest_prefix(self, hashes: list[bytes]) -> tuple[int, BlockTables, int]:
        blocks = self.managers[0].longest_prefix(hashes)
        return len(blocks), [blocks], len(blocks)


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several KV cache groups: full attention, sliding windows of several lengths, states.

    A block's key in the pool is its hash and its group: the same tokens are cached and evicted by
    group.
    """

    def __init__(
        self,
        pool: BlockPool,
        managers: Sequence[SingleTypeManager],
        block_size: int,
        enable_caching: bool = True,
    ) -> None:
        super().__init__(pool, managers, block_size, enable_caching)
        #: Groups whose blocks hold tokens, or states after tokens.
        self._of_tokens = [manager for manager in self.managers if manager not in self._cross]
        attending = [manager for manager in self._of_tokens if manager is not self.states]
        self._types = _attention_types(attending)
        self._lookups = {manager.suffix: manager.pool.get_cached_block for manager in managers}

    def _longest_prefix(self, hashes: list[bytes]) -> tuple[int, BlockTables, int]:
        lookups = self._lookups

        def is_cached(index: int, suffix: bytes) -> bool:
            return lookups[suffix](hashes[index] + suffix) is not None

        hit = branch = longest_common_hit(self._types, len(hashes), is_cached)
        if self.states is not None and hit:
            types = [*self._types, self.states.attention_type]
            hit = longest_common_hit(types, branch, is_cached)
        tables = [manager.cached_blocks_of(hashes[:hit]) for manager in self._of_tokens]
        return hit, tables, branch


def _attention_types(managers: Sequence[SingleTypeManager]) -> list[HitRequirement]:
    """The groups with equal windows together, full attention first."""
    by_window: dict[int, list[SingleTypeManager]] = {}
    for manager in managers:
        by_window.setdefault(manager.window, []).append(manager)
    return [
        HitRequirement(
            alike[0].attention_type.num_required_blocks, tuple(manager.suffix for manager in alike)
        )
        for _, alike in sorted(by_window.items())
    ]
