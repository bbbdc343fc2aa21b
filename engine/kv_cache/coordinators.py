"""The coordinators: for models whose layers all attend alike, and for those of several kinds."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.coordinator import KVCacheCoordinator, Tables
from engine.kv_cache.hashing import group_key
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.prefix_search import AttentionType, longest_common_hit
from engine.kv_cache.single_type_managers import (
    FullAttentionManager,
    SingleTypeManager,
    SlidingWindowManager,
)


def make_coordinator(
    layout: KVLayout | None, num_blocks: int, block_size: int, enable_caching: bool = True
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

    def capacity(self, num_blocks: int, chunk: int, longest: int = 0) -> int:
        """Tokens of the longest sequence that can run in so many blocks; see the base."""
        if not self._trims:
            return num_blocks * self.block_size
        return super().capacity(num_blocks, chunk, longest)

    def _find(self, hashes: list[bytes]) -> Tables:
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

    def _find(self, hashes: list[bytes]) -> Tables:
        """See the base. Blocks that the next token doesn't see are left out."""
        lookup = self.pool.lookup
        hit = longest_common_hit(
            self._types,
            len(hashes),
            lambda index, suffix: lookup(hashes[index] + suffix) is not None,
        )
        return [manager.found(hashes[:hit]) for manager in self.managers]


def _attention_types(managers: Sequence[SingleTypeManager]) -> list[AttentionType]:
    """The groups of equal window together, full attention first."""
    by_window: dict[int, list[SingleTypeManager]] = {}
    for manager in managers:
        by_window.setdefault(manager.window, []).append(manager)
    return [
        AttentionType(alike[0].attention_type.reach, tuple(each.suffix for each in alike))
        for _, alike in sorted(by_window.items())
    ]
