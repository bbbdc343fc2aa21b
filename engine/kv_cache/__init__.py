"""The paged KV cache: blocks, their free list, prefix hashes and each sequence's block tables."""

from engine.kv_cache.accounts import Account
from engine.kv_cache.block import NULL_BLOCK, Block
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.factory import make_manager
from engine.kv_cache.hybrid import HybridKVCacheManager
from engine.kv_cache.layout import KVGroup, KVLayout, make_layout
from engine.kv_cache.manager import KVCacheManager

__all__ = [
    "NULL_BLOCK",
    "Account",
    "Block",
    "BlockPool",
    "HybridKVCacheManager",
    "KVCacheManager",
    "KVGroup",
    "KVLayout",
    "make_layout",
    "make_manager",
]
