"""Whose blocks they are: each tenant's used and free blocks, its reserve and its maximum.

Every block that is in use is charged to exactly one tenant: the one that took it from a free list.
Others who share it meanwhile (that takes an equal cache namespace) are its guests and pay nothing;
when the owner lets go first, the block is charged to one of them. A free block stays with the
tenant that used it last, until another one takes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

from engine.kv_cache.block import TenantQuota
from engine.lazy_heap import LazyHeap

#: A tenant's share and its reserve last for so long after its last request.
PRESENT_S = 600.0
_EXPIRE_EVERY_S = 10.0
#: Whoever sent a request in so long is about: steps are held short for it.
LATELY_S = 60.0
#: A tenant gives a sixteenth of its blocks before the shares are looked at again.
_PART_AT_ONCE = 16


class TenantQuotas:
    """All tenants of a pool, by name.

    Args:
        num_blocks: the pool's size.
        clock: seconds; only differences matter.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_blocks = num_blocks
        #: Blocks that no reserve takes: what the longest request needs, so that reserves, whatever
        #: they add up to, make nobody else's request one that can never run.
        self.unreservable_blocks = 0
        self._clock = clock
        self._expired_at = clock()
        #: Who has the blocks that were never used.
        self.unowned = TenantQuota("", num_blocks)
        self._quotas: dict[str, TenantQuota] = {}
        #: Those with a reserve.
        self.tenants_with_reserve: list[TenantQuota] = []
        self._total_weight = 0.0
        #: Those that have a share; whoever sent a request last is at the end.
        self._present: dict[TenantQuota, None] = {}
        #: Those with free blocks, most over their share first.
        self._evictable = LazyHeap()

    def __iter__(self) -> Iterator[TenantQuota]:
        return iter(self._quotas.values())

    def __len__(self) -> int:
        return len(self._quotas)

    def get(self, name: str) -> TenantQuota:
        """The tenant's quota, opened when it has none."""
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
        """A request of the tenant came, with what it is entitled to as of now.

        Args:
            name: the tenant.
            weight: its share beside others, > 0.
            reserved_fraction: of the pool, in [0, 1]. Where all reserves are more than the pool
                without `unreservable_blocks`, those who came first have theirs whole.
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
        """Somebody came, went or changed; what a reserve is worth changes with it."""
        self._total_weight += weight
        for quota in self.tenants_with_reserve:
            self.mark_evictable(quota)

    def _reserve(self, quota: TenantQuota, requested: int) -> None:
        """Reserve as many blocks as wanted, or as others have left."""
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
        """Who hasn't been here for a while has no share and no reserve; empty quotas go."""
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
        """Whether anybody but these sent a request in the last minute."""
        latest = next((quota for quota in reversed(self._present) if quota not in excluded), None)
        return latest is not None and self._clock() - latest.seen_at < LATELY_S

    def drop_idle(self) -> None:
        """Who uses nothing and has nothing waiting counts as long gone."""
        self._drop_idle(float("inf"))
        self._expired_at = self._clock()

    def other_reserves(self, quota: TenantQuota) -> int:
        """Blocks reserved for other tenants."""
        return sum(other.reserved for other in self.tenants_with_reserve if other is not quota)

    def reserved_by_other_tenants(self, quota: TenantQuota) -> int:
        """Blocks that must stay free for everyone else's reserve."""
        return sum(
            other.unused_reserve for other in self.tenants_with_reserve if other is not quota
        )

    def uncovered_reserves(self, num_free: int) -> list[TenantQuota]:
        """Those with a reserve, when fewer blocks are free than they haven't used of it."""
        if sum(quota.unused_reserve for quota in self.tenants_with_reserve) <= num_free:
            return []
        return list(self.tenants_with_reserve)

    def limit(self, quota: TenantQuota) -> int:
        """Most blocks that the tenant could ever use, with nobody else there."""
        return min(quota.maximum, self.num_blocks - self.other_reserves(quota))

    def weight_fraction(self, quota: TenantQuota) -> float:
        """The tenant's part of everything, by weight among those present; 0 of who isn't."""
        if quota not in self._present or not self._total_weight:
            return 0.0
        return quota.weight / self._total_weight

    def fair_share_blocks(self, quota: TenantQuota) -> float:
        """Blocks that are the tenant's by weight among those present, at least its reserve."""
        return max(quota.reserved, self.num_blocks * self.weight_fraction(quota))

    def usage_ratio(self, quota: TenantQuota, blocks: int) -> float:
        """How far over its share a tenant with so many blocks is: 1 is just its share."""
        share = self.fair_share_blocks(quota)
        return blocks / share if share else float("inf")

    def mark_evictable(self, quota: TenantQuota) -> None:
        """Say that the tenant has free blocks, or holds more blocks than before."""
        if quota.free.count:
            self._evictable.put(quota.name, self._rank(quota))

    def next_to_evict(self) -> tuple[TenantQuota, int]:
        """Whose free blocks are taken next, and how many at a time.

        Those that nobody ever used, then those of whoever is most over its share, counting what it
        uses and what it keeps cached; among the absent, of whoever went first. Raises IndexError
        when there is no free block.
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
                # It has less than when it was listed; who has more is listed anew at once.
                self._evictable.put(name, rank)
                continue
            if len(self._evictable) == 1 or not self.fair_share_blocks(quota):
                return quota, quota.free.count
            part = (quota.used + quota.free.count) // _PART_AT_ONCE
            return quota, min(quota.free.count, max(1, part))
        raise IndexError("No block is free.")

    def _rank(self, quota: TenantQuota) -> tuple[float, float]:
        """The order of eviction: the excess, but for a factor that all have in common.

        So it doesn't change with whoever else comes and goes, but for those with a reserve.
        """
        num_blocks = quota.used + quota.free.count
        reserve = quota.reserved * self._total_weight / self.num_blocks
        weight = max(quota.weight if quota in self._present else 0.0, reserve)
        return (-num_blocks / weight if weight else float("-inf")), quota.seen_at
