"""The paged KV cache: blocks, their free list, prefix hashes and each sequence's block table."""

from engine.kv_cache.block import Block
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.manager import KVCacheManager

__all__ = ["Block", "BlockPool", "KVCacheManager"]
