"""`ReadAhead`: which blocks of a new request are read from a storage, and for how long."""

from __future__ import annotations

import functools
import time
from concurrent.futures import Future

from engine.kv_transfer.base import RequestView
from engine.kv_transfer.block_keys import BlockKeys
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.storage_queue import READ_TIMEOUT_S, StorageQueue

#: How long a reader's thread may have to wait for a core on a busy machine.
_MIN_READ_S = 0.5


class ReadAhead:
    """Reads blocks from a storage into host memory, unless computing them is faster.

    Attributes:
        compute_s: seconds that computing a block takes; unknown at first.
        max_blocks: number of blocks that host memory holds.
    """

    def __init__(self, storage: StorageQueue, host: HostTier, block_size: int) -> None:
        """`block_size`: tokens per block."""
        self._storage, self._host, self._block_size = storage, host, block_size
        self.compute_s = READ_TIMEOUT_S
        self.max_blocks = 0

    def start(
        self, request: RequestView, num_computed_tokens: int, needs_encoding: bool, keys: BlockKeys
    ) -> Future[None] | None:
        """Read ahead the blocks after a request's first tokens, as `start_read_ahead` does."""
        storage, token_ids = self._storage, request.token_ids
        if storage.hangs:
            return None
        if not request.prefilled:
            storage.refresh_soon()
        size = self._block_size
        first, end = num_computed_tokens // size, (len(token_ids) - 1) // size
        end = min(end, first + self.max_blocks)
        if not request.prefilled:
            hashes = request.block_hashes.hash_full_blocks(token_ids, size)[first:end]
            end = first + keys.longest_hit(
                hashes, lambda key: key in self._host or storage.may_contain(key)
            )
            if end > first and not (keys.are_all_needed or storage.tier.is_indexed):
                return self._start_longest_hit(request, first, end, keys)
        # Blocks that all tokens need are read first: up to the first one that can't be read.
        blocks = keys.encoder_blocks(request) if needs_encoding else []
        if not all(storage.may_contain(key) for block in blocks for key in block.keys):
            blocks = []
        if end > first:
            blocks += keys.blocks_of(request, first * size, end * size)
        missing = [key for block in blocks for key in block.keys if key not in self._host]
        if not missing:
            return None
        # Loading that takes longer than computing is useless.
        timeout_s = max(_MIN_READ_S, len(missing) * self.compute_s)
        return storage.read_ahead(
            missing,
            request.tenant,
            request.cache_namespace,
            timeout_s,
            source=request.kv_peer,
            refresh=request.prefilled,
        )

    def follow(self, request: RequestView, num_computed_tokens: int, keys: BlockKeys) -> None:
        """Read the blocks after a request's first tokens while a prefill replica computes them."""
        size = self._block_size
        first, end = num_computed_tokens // size, (len(request.token_ids) - 1) // size
        end = min(end, first + self.max_blocks)
        if end <= first:
            return
        blocks = keys.blocks_of(request, first * size, end * size)
        missing = [key for block in blocks for key in block.keys if key not in self._host]
        self._storage.follow(
            request.request_id, missing, request.tenant, request.cache_namespace, request.kv_peer
        )

    def _start_longest_hit(
        self, request: RequestView, first: int, end: int, keys: BlockKeys
    ) -> Future[None]:
        """Read ahead for groups whose windows and states at a prompt's end are useful only if the
        storage has all of them for the same end, which must be looked up.
        """
        storage, size = self._storage, self._block_size
        # Not by the reader: once that is late, the request runs and hashes its tokens, too.
        hashes = request.block_hashes.hash_full_blocks(request.token_ids, size)[:end]
        timeout_s = max(_MIN_READ_S, (end - first) * self.compute_s)
        deadline = time.monotonic() + timeout_s
        host, tier = self._host, storage.tier

        def is_saved(key: bytes) -> bool:
            return key in host or (
                time.monotonic() < deadline and tier.is_stored(key, request.tenant)
            )

        def keys_to_read() -> list[bytes]:
            num_blocks = keys.longest_hit(hashes[first:], functools.cache(is_saved))
            if not num_blocks:
                return []
            end = first + num_blocks
            blocks = keys.blocks_of_hashes(hashes[:end], first * size, end * size)
            return [key for block in blocks for key in block.keys if key not in host]

        return storage.read_ahead(keys_to_read, request.tenant, request.cache_namespace, timeout_s)
