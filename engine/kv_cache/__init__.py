"""The paged KV cache: blocks, their free lists, prefix hashes and the block tables of sequences."""

from engine.kv_cache.block import NULL_BLOCK, Block, TenantQuota
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.coordinator import BlockTables, CachedPrefix, KVCacheCoordinator
from engine.kv_cache.coordinators import make_coordinator
from engine.kv_cache.kv_cache_config import KVCacheConfig, KVCacheGroupSpec, make_kv_cache_config
from engine.kv_cache.prefix_cache import BlockHashes, ContentKey

__all__ = [
    "NULL_BLOCK",
    "Block",
    "BlockHashes",
    "BlockPool",
    "BlockTables",
    "CachedPrefix",
    "ContentKey",
    "KVCacheConfig",
    "KVCacheCoordinator",
    "KVCacheGroupSpec",
    "TenantQuota",
    "make_coordinator",
    "make_kv_cache_config",
]
