"""The pool of all KV blocks: which are in use, which are cached, which are evicted next."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.contract.metrics import Histograms
from engine.kv_cache.block import NULL_BLOCK, Block, TenantQuota
from engine.kv_cache.tenant_quotas import TenantQuotas

#: One of this many allocated blocks is sampled.
SAMPLE_EVERY = 64


class BlockResidencyMetrics:
    """Samples every 64th allocated block until it's evicted or reallocated.

    A block that was not cached when it was reallocated wasn't evicted: only its gaps count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_next = SAMPLE_EVERY
        #: Block id -> time of allocation, time of last use.
        self._followed: dict[int, tuple[float, float]] = {}
        self.histograms = Histograms(
            "kv_block_lifetime_seconds",
            "kv_block_idle_before_evict_seconds",
            "kv_block_reuse_gap_seconds",
        )

    def allocated(self, blocks: list[Block]) -> None:
        """Record newly allocated blocks, which have no content yet."""
        if self._followed:
            for block in blocks:
                self._followed.pop(block.block_id, None)
        self._until_next -= len(blocks)
        if self._until_next <= 0 and blocks:
            self._until_next = SAMPLE_EVERY
            now = self._clock()
            self._followed[blocks[-1].block_id] = (now, now)

    def on_hit(self, blocks: Iterable[Block]) -> None:
        """Record cached blocks that were hit by a prefix."""
        if not self._followed:
            return
        for block in blocks:
            seen = self._followed.get(block.block_id)
            if seen is not None:
                now = self._clock()
                self.histograms.observe("kv_block_reuse_gap_seconds", now - seen[1])
                self._followed[block.block_id] = (seen[0], now)

    def on_free(self, block: Block) -> None:
        """Record that the last sequence using this block has released it."""
        seen = self._followed.get(block.block_id)
        if seen is not None:
            self._followed[block.block_id] = (seen[0], self._clock())

    def evicted(self, block: Block) -> None:
        """Record that this block's cached content is evicted."""
        seen = self._followed.pop(block.block_id, None)
        if seen is None:
            return
        now = self._clock()
        self.histograms.observe("kv_block_lifetime_seconds", now - seen[0])
        self.histograms.observe("kv_block_idle_before_evict_seconds", now - seen[1])

    def forget(self) -> None:
        """Stop sampling all blocks: the cache was emptied without evictions."""
        self._followed.clear()


class BlockPool:
    """All blocks of a replica.

    Every block is either used (`ref_count > 0`) or in its last user's free list. A full block may
    also be cached under its hash, used or free; a free cached block is evicted when it is
    reallocated. Two blocks may hold the same content (block tables are append-only, so a duplicate
    isn't replaced); a hash then maps to several blocks. Blocks are counted by tenant, see `quotas`;
    callers without tenants omit the quota.
    """

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"A pool needs at least one block, got {num_blocks}.")
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.quotas = TenantQuotas(num_blocks, clock)
        self.residency = BlockResidencyMetrics(clock)
        #: Number of blocks that can be allocated now, cached ones included.
        self.num_free_blocks = 0
        self._reset_free_blocks(self.blocks)
        self.enable_caching = enable_caching
        # Nearly every hash has one block: it's stored directly, a dict only for duplicates.
        self._cached: dict[bytes, Block | dict[int, Block]] = {}
        #: Blocks that a prefix could hit.
        self.num_cached = 0
        #: Ids of changed blocks, for observers; None: there are none.
        self.changed_block_ids: set[int] | None = None
        #: Called with each key under which no block is cached any more, except by a reset.
        self.on_uncached: Callable[[bytes], None] | None = None

    @property
    def num_blocks(self) -> int:
        """All blocks, used and free."""
        return len(self.blocks)

    @property
    def free_blocks_in_order(self) -> Iterator[Block]:
        """The free blocks, tenant by tenant; within a tenant in order of eviction."""
        yield from self.quotas.unowned.free
        for quota in self.quotas:
            yield from quota.free

    def num_available_blocks(self, quota: TenantQuota) -> int:
        """Number of blocks that the tenant may allocate: within its maximum and others'
        reserves.
        """
        available = quota.maximum - quota.used
        if not self.quotas.tenants_with_reserve:
            return min(available, self.num_free_blocks)
        return min(available, self.num_free_blocks - self.quotas.reserved_by_other_tenants(quota))

    def _reset_free_blocks(self, blocks: Iterable[Block]) -> None:
        """Put blocks that are in no list into the list of never-used blocks."""
        unowned = self.quotas.unowned
        for block in blocks:
            block.charged_to = unowned
            unowned.free.append(block)
            self.num_free_blocks += 1

    @property
    def usage(self) -> float:
        """Share of blocks in use, in [0, 1]."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    def is_cached(self, block_hash: bytes) -> bool:
        """Whether a block has this content. May be called in any thread."""
        return block_hash in self._cached

    def get_cached_block(self, block_hash: bytes) -> Block | None:
        """A block with this content, or None."""
        cached = self._cached.get(block_hash)
        if isinstance(cached, dict):
            return next(iter(cached.values()))
        return cached

    def get_new_blocks(self, count: int, quota: TenantQuota | None = None) -> list[Block]:
        """Allocate `count` free blocks for a tenant, evicting their cached content.

        Raises RuntimeError if fewer are free: callers check `num_available_blocks` first.
        """
        if count > self.num_free_blocks:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free_blocks} are free.")
        quota = quota or self.quotas.get("")
        new_blocks: list[Block] = []
        while len(new_blocks) < count:
            source, num_evictable = self.quotas.next_to_evict()
            for block in source.free.pop(min(num_evictable, count - len(new_blocks))):
                if block.block_hash is not None:
                    self.residency.evicted(block)
                    self.evict(block)
                block.ref_count = 1
                block.charged_to = quota
                new_blocks.append(block)
        quota.used += count
        self.num_free_blocks -= count
        self.quotas.mark_evictable(quota)
        self.residency.allocated(new_blocks)
        if self.changed_block_ids is not None:
            self._record_change(new_blocks)
        return new_blocks

    def _record_change(self, blocks: Sequence[Block]) -> None:
        """Record changed blocks for observers."""
        if self.changed_block_ids is not None:
            self.changed_block_ids.update(block.block_id for block in blocks)

    def touch(self, blocks: Sequence[Block], quota: TenantQuota | None = None) -> None:
        """Add a reference to cached blocks; free ones leave the free list."""
        quota = quota or self.quotas.get("")
        for block in blocks:
            owner = block.charged_to
            if block.ref_count == 0:
                if owner is not None:
                    owner.free.remove(block)
                self.num_free_blocks -= 1
                block.charged_to = quota
                quota.used += 1
            elif owner is not quota:
                guests = block.sharers = block.sharers or {}
                guests[quota] = guests.get(quota, 0) + 1
            block.ref_count += 1
        self.residency.on_hit(blocks)
        self.quotas.mark_evictable(quota)
        if self.changed_block_ids is not None:
            self._record_change(blocks)

    def free_blocks(self, blocks: Sequence[Block], quota: TenantQuota | None = None) -> None:
        """Drop one reference of a tenant to these blocks, given in block-table order.

        They are freed in reverse: the last block covers the longest prefix and is the least likely
        to be hit again, so it is evicted first.
        """
        quota = quota or self.quotas.get("")
        if self.changed_block_ids is not None:
            self._record_change(blocks)
        for block in reversed(blocks):
            block.ref_count -= 1
            if block.sharers is not None:
                self._release_shared(block, block.sharers, quota)
            owner = block.charged_to
            if block.ref_count == 0 and owner is not None:
                owner.used -= 1
                owner.free.append(block)
                self.num_free_blocks += 1
                self.residency.on_free(block)
                if owner.free.count == 1:
                    self.quotas.mark_evictable(owner)

    def _release_shared(
        self, block: Block, guests: dict[TenantQuota, int], quota: TenantQuota
    ) -> None:
        """Drop a reference to a block that tenants share; if its owner leaves, a guest inherits
        it.
        """
        owner = block.charged_to
        if quota is not owner:
            guests[quota] -= 1
            if not guests[quota]:
                del guests[quota]
        elif block.ref_count == sum(guests.values()):
            heir = next(iter(guests))
            owner.used -= 1
            heir.used += 1
            self.quotas.mark_evictable(heir)
            block.charged_to = heir
            del guests[heir]
        block.sharers = guests or None

    def cache_block(self, block: Block, block_hash: bytes) -> None:
        """Register a full block under its hash."""
        if not self.enable_caching:
            return
        if block.block_hash is not None:
            raise RuntimeError(f"{block} is already cached.")
        block.block_hash = block_hash
        self.num_cached += 1
        if self.changed_block_ids is not None:
            self.changed_block_ids.add(block.block_id)
        cached = self._cached.get(block_hash)
        if cached is None:
            self._cached[block_hash] = block
        elif isinstance(cached, dict):
            cached[block.block_id] = block
        else:
            self._cached[block_hash] = {cached.block_id: cached, block.block_id: block}

    def evict(self, block: Block) -> None:
        """Uncache a block."""
        block_hash = block.block_hash
        if block_hash is None:
            return
        block.block_hash = None
        self.num_cached -= 1
        if self.changed_block_ids is not None:
            self.changed_block_ids.add(block.block_id)
        cached = self._cached[block_hash]
        if isinstance(cached, dict):
            del cached[block.block_id]
            if len(cached) == 1:
                self._cached[block_hash] = next(iter(cached.values()))
        else:
            del self._cached[block_hash]
            if self.on_uncached is not None:
                self.on_uncached(block_hash)

    def discard(self, block: Block) -> None:
        """Uncache an unused block and make it the next to be allocated."""
        self.evict(block)
        self.evict_first(block)

    def evict_first(self, block: Block) -> None:
        """Make a block the next of its tenant to be allocated, unless it's in use."""
        if block.ref_count == 0 and block.charged_to is not None:
            block.charged_to.free.remove(block)
            block.charged_to.free.prepend(block)

    def uncache_all(self, block_hash: bytes) -> None:
        """Uncache all blocks with this content."""
        while (block := self.get_cached_block(block_hash)) is not None:
            self.evict(block)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content; False, without effect, while any block is in use."""
        if self.num_free_blocks != self.num_blocks:
            return False
        for block in self.blocks:
            block.block_hash = None
        self._cached.clear()
        self.num_cached = 0
        self._record_change(self.blocks)
        self.residency.forget()
        for quota in self.quotas:
            self.num_free_blocks -= quota.free.count
            self._reset_free_blocks(quota.free.pop(quota.free.count))
        return True

    def check_integrity(self, tables: Iterable[tuple[str, Sequence[Block]]] = ()) -> None:
        """Raise RuntimeError unless free + used = all and all counts are right.

        Args:
            tables: the block tables of all live sequences, each with its tenant; reference counts
                must match them.
        """
        free_ids = [block.block_id for block in self.free_blocks_in_order]
        if len(free_ids) != len(set(free_ids)) or len(free_ids) != self.num_free_blocks:
            raise RuntimeError("A free list holds a block twice, or its count is off.")
        uses: dict[int, Counter[str]] = defaultdict(Counter)
        for tenant, table in tables:
            for block in table:
                if block is not NULL_BLOCK:
                    uses[block.block_id][tenant] += 1
        free = set(free_ids)
        for block in self.blocks:
            count = uses[block.block_id].total() if block.block_id in uses else 0
            if block.ref_count != count:
                raise RuntimeError(f"{block} is in {count} block tables.")
            if (block.block_id in free) != (block.ref_count == 0):
                raise RuntimeError(f"{block} is free and used at once, or neither.")
            alike = self._cached.get(block.block_hash or b"")
            holds = block.block_id in alike if isinstance(alike, dict) else alike is block
            if block.block_hash is not None and not holds:
                raise RuntimeError(f"{block} is cached, but its hash does not lead to it.")
        self._check_quotas(uses)
        entries = sum(len(v) if isinstance(v, dict) else 1 for v in self._cached.values())
        cached = sum(block.block_hash is not None for block in self.blocks)
        if not entries == cached == self.num_cached:
            raise RuntimeError(f"{entries} cache entries for {cached} cached blocks.")

    def _check_quotas(self, uses: dict[int, Counter[str]]) -> None:
        """Raise RuntimeError unless every used block is charged exactly once, to one of its
        users.
        """
        charged: Counter[str] = Counter()
        for block_id, users in uses.items():
            owner, guests = self.blocks[block_id].charged_to, self.blocks[block_id].sharers or {}
            if owner is None or not users[owner.name]:
                raise RuntimeError(f"Block {block_id} is charged to {owner}, used by {users}.")
            charged[owner.name] += 1
            sharer_counts = {guest.name: count for guest, count in guests.items()}
            if sharer_counts != {
                name: count for name, count in users.items() if name != owner.name
            }:
                raise RuntimeError(
                    f"Block {block_id} has guests {sharer_counts}, is used by {users}."
                )
        for quota in self.quotas:
            if quota.used != charged[quota.name]:
                raise RuntimeError(f"{quota} uses {charged[quota.name]} blocks.")
