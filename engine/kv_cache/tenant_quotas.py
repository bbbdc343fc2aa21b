"""Accounting of blocks by tenant: each tenant's used and free blocks, its reserve and its maximum.

Every block in use is charged to exactly one tenant: the one that took it from a free list. Other
tenants that share it meanwhile (this requires equal cache namespaces) are its guests and aren't
charged; if the owner releases it first, it is charged to one of them. A free block stays with the
tenant that used it last, until another one takes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

from engine.kv_cache.block import TenantQuota
from engine.lazy_heap import LazyHeap

#: A tenant's share and reserve expire this long after its last request.
PRESENT_S = 600.0
_EXPIRE_EVERY_S = 10.0
#: A tenant that sent a request within this time is active: steps are kept short for it.
LATELY_S = 60.0
#: A tenant loses up to a sixteenth of its blocks before shares are compared again.
_PART_AT_ONCE = 16


class TenantQuotas:
    """All tenants of a pool, by name.

    Args:
        num_blocks: the pool's size.
        clock: seconds; only differences matter.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_blocks = num_blocks
        #: Blocks that can't be reserved: what the longest request needs, so that reserves, however
        #: large their sum, never make another tenant's request impossible to run.
        self.unreservable_blocks = 0
        self._clock = clock
        self._expired_at = clock()
        #: Owner of the blocks that were never used.
        self.unowned = TenantQuota("", num_blocks)
        self._quotas: dict[str, TenantQuota] = {}
        #: Tenants with a reserve.
        self.tenants_with_reserve: list[TenantQuota] = []
        self._total_weight = 0.0
        #: Tenants with a share; the one that sent a request last is at the end.
        self._present: dict[TenantQuota, None] = {}
        #: Tenants with free blocks, the one most over its share first.
        self._evictable = LazyHeap()

    def __iter__(self) -> Iterator[TenantQuota]:
        return iter(self._quotas.values())

    def __len__(self) -> int:
        return len(self._quotas)

    def get(self, name: str) -> TenantQuota:
        """The tenant's quota, created if there is none."""
        quota = self._quotas.get(name)
        if quota is None:
            quota = self._quotas[name] = TenantQuota(name, self.num_blocks)
        return quota

    def record_request(
        self,
        name: str,
        weight: float = 1.0,
        reserved_fraction: float = 0.0,
        max_fraction: float = 1.0,
    ) -> TenantQuota:
        """Update a tenant's entitlement when it sends a request.

        Args:
            name: the tenant.
            weight: its share relative to others, > 0.
            reserved_fraction: of the pool, in [0, 1]. If all reserves exceed the pool without
                `unreservable_blocks`, those of earlier tenants are granted in full.
            max_fraction: of the pool, in (0, 1].
        """
        now = self._clock()
        if now - self._expired_at >= _EXPIRE_EVERY_S:
            self._drop_idle(now)
        quota = self.get(name)
        quota.seen_at = now
        added = weight - (quota.weight if quota in self._present else 0.0)
        self._present.pop(quota, None)
        self._present[quota] = None
        quota.weight = weight
        quota.maximum = max(1, int(max_fraction * self.num_blocks))
        self._reserve(quota, int(reserved_fraction * self.num_blocks))
        if added:
            self._add_weight(added)
            self.mark_evictable(quota)
        return quota

    def _add_weight(self, weight: float) -> None:
        """Change the total weight, on which the rank of tenants with a reserve depends."""
        self._total_weight += weight
        for quota in self.tenants_with_reserve:
            self.mark_evictable(quota)

    def _reserve(self, quota: TenantQuota, requested: int) -> None:
        """Reserve the requested number of blocks, or as many as others have left."""
        if not requested and not quota.reserved:
            return
        reservable = self.num_blocks - self.unreservable_blocks - self.other_reserves(quota)
        quota.reserved = max(0, min(requested, quota.maximum, reservable))
        if quota not in self.tenants_with_reserve:
            self.tenants_with_reserve.append(quota)
        if not quota.reserved:
            self.tenants_with_reserve.remove(quota)
        self.mark_evictable(quota)

    def _drop_idle(self, now: float) -> None:
        """Remove shares and reserves of tenants that are idle for long; delete empty quotas."""
        self._expired_at = now
        for quota in list(self._quotas.values()):
            if quota.used or quota.sequences or now - quota.seen_at < PRESENT_S:
                continue
            if quota in self._present:
                del self._present[quota]
                self._reserve(quota, 0)
                self._add_weight(-quota.weight)
                self.mark_evictable(quota)
            if not quota.free.count:
                del self._quotas[quota.name]

    def has_other_recent_tenants(self, excluded: Collection[TenantQuota]) -> bool:
        """Whether tenants other than these sent a request in the last minute."""
        latest = next((quota for quota in reversed(self._present) if quota not in excluded), None)
        return latest is not None and self._clock() - latest.seen_at < LATELY_S

    def drop_idle(self) -> None:
        """Treat tenants that use nothing and have nothing waiting as idle for long."""
        self._drop_idle(float("inf"))
        self._expired_at = self._clock()

    def other_reserves(self, quota: TenantQuota) -> int:
        """Blocks reserved for other tenants."""
        return sum(other.reserved for other in self.tenants_with_reserve if other is not quota)

    def reserved_by_other_tenants(self, quota: TenantQuota) -> int:
        """Blocks that must stay free for all other tenants' reserves."""
        return sum(
            other.unused_reserve for other in self.tenants_with_reserve if other is not quota
        )

    def uncovered_reserves(self, num_free: int) -> list[TenantQuota]:
        """Tenants with a reserve, if fewer blocks are free than their unused reserves."""
        if sum(quota.unused_reserve for quota in self.tenants_with_reserve) <= num_free:
            return []
        return list(self.tenants_with_reserve)

    def limit(self, quota: TenantQuota) -> int:
        """Maximum number of blocks that the tenant could use if no other tenant were active."""
        return min(quota.maximum, self.num_blocks - self.other_reserves(quota))

    def weight_fraction(self, quota: TenantQuota) -> float:
        """The tenant's fraction by weight among tenants with a share; 0 if it has none."""
        if quota not in self._present or not self._total_weight:
            return 0.0
        return quota.weight / self._total_weight

    def fair_share_blocks(self, quota: TenantQuota) -> float:
        """Number of blocks that are the tenant's by weight, at least its reserve."""
        return max(quota.reserved, self.num_blocks * self.weight_fraction(quota))

    def usage_ratio(self, quota: TenantQuota, blocks: int) -> float:
        """Ratio of `blocks` to the tenant's share; 1: exactly its share."""
        share = self.fair_share_blocks(quota)
        return blocks / share if share else float("inf")

    def mark_evictable(self, quota: TenantQuota) -> None:
        """Record that the tenant has free blocks, or holds more blocks than before."""
        if quota.free.count:
            self._evictable.put(quota.name, self._rank(quota))

    def next_to_evict(self) -> tuple[TenantQuota, int]:
        """The tenant whose free blocks are taken next, and how many at a time.

        First blocks that were never used, then those of the tenant that is most over its share,
        counting used and cached blocks; tenants without a share are ordered by their last request.
        Raises IndexError if no block is free.
        """
        if self.unowned.free.count:
            return self.unowned, self.unowned.free.count
        while (first := self._evictable.first()) is not None:
            name, listed = first
            quota = self._quotas.get(name)
            if quota is None or not quota.free.count:
                self._evictable.discard(name)
                continue
            rank = self._rank(quota)
            if rank != listed:
                # It has fewer blocks than when it was listed; one with more is relisted at once.
                self._evictable.put(name, rank)
                continue
            if len(self._evictable) == 1 or not self.fair_share_blocks(quota):
                return quota, quota.free.count
            part = (quota.used + quota.free.count) // _PART_AT_ONCE
            return quota, min(quota.free.count, max(1, part))
        raise IndexError("No block is free.")

    def _rank(self, quota: TenantQuota) -> tuple[float, float]:
        """The order of eviction: by excess over the share, up to a factor common to all tenants.

        So it doesn't change when other tenants come and go, except for tenants with a reserve.
        """
        num_blocks = quota.used + quota.free.count
        reserve = quota.reserved * self._total_weight / self.num_blocks
        weight = max(quota.weight if quota in self._present else 0.0, reserve)
        return (-num_blocks / weight if weight else float("-inf")), quota.seen_at
