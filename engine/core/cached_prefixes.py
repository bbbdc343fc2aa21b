"""`CachedPrefixes`: which prompts' beginnings a replica needn't compute, for gateways."""

from __future__ import annotations

from engine.kv_cache.coordinator import KVCacheCoordinator
from engine.kv_transfer.base import KVConnectorBase
from engine.scheduler import Sequence

#: Number of remembered prompts, the most recent ones: 16 bytes of each are in every heartbeat.
MAX_PREFIXES = 256


class CachedPrefixes:
    """Beginnings of recent prompts by the keys that gateways gave them.

    Attributes:
        connector: may have blocks in the replica's own memory; None: there are none.
    """

    def __init__(self, kv: KVCacheCoordinator) -> None:
        self.connector: KVConnectorBase | None = None
        self._kv = kv
        #: By key, the hash of a prompt's first block; in the order of their last use.
        self._first_blocks: dict[bytes, bytes] = {}

    def record(self, key: bytes, sequence: Sequence) -> None:
        """Remember a prompt, unless it has no key or is too short to hit the cache."""
        size = self._kv.block_size
        if not (key and sequence.reads_cache and sequence.num_prompt_tokens > size):
            return
        hashes = sequence.block_hashes.hash_full_blocks(sequence.token_ids[:size], size)
        self._first_blocks.pop(key, None)
        self._first_blocks[key] = hashes[0]
        if len(self._first_blocks) > MAX_PREFIXES:
            del self._first_blocks[next(iter(self._first_blocks))]

    def keys(self) -> frozenset[bytes]:
        """Keys of those whose first block is in the KV cache, or in host memory from where it is
        loaded. May be called in any thread.
        """
        connector = self.connector
        return frozenset(
            key
            # A copy, as the engine's thread may change it.
            for key, block_hash in self._first_blocks.copy().items()
            if self._kv.is_cached(block_hash)
            or (connector is not None and connector.has_in_memory(block_hash))
        )
