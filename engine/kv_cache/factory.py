"""The manager that fits a layout."""

from __future__ import annotations

from engine.kv_cache.hybrid import HybridKVCacheManager
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.manager import KVCacheManager


def make_manager(
    layout: KVLayout | None, num_blocks: int, block_size: int, enable_caching: bool = True
) -> KVCacheManager:
    """The plain manager for full attention everywhere (and for no layout), else the hybrid one."""
    if layout is None or layout.windows == (0,):
        return KVCacheManager(num_blocks, block_size, enable_caching)
    return HybridKVCacheManager(layout, num_blocks, block_size, enable_caching)
