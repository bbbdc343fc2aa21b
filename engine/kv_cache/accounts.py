"""Whose blocks they are: each tenant's used and free blocks, its reserve and its maximum.

Every block that is in use is charged to exactly one tenant: the one that took it from a free list.
Others who share it meanwhile (that takes an equal cache namespace) are its guests and pay nothing;
when the owner lets go first, the block is charged to one of them. A free block stays with the
tenant that used it last, until another one takes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from engine.kv_cache.free_list import FreeList
from engine.lazy_heap import LazyHeap

#: A tenant's share and its reserve last for so long after its last request.
PRESENT_S = 600.0
_EXPIRE_EVERY_S = 10.0
#: A tenant gives a sixteenth of its blocks before the shares are looked at again.
_PART_AT_ONCE = 16


class Account:
    """One tenant's blocks. Limits are in blocks."""

    __slots__ = (
        "free",
        "maximum",
        "name",
        "present",
        "reserved",
        "running",
        "seen_at",
        "sequences",
        "used",
        "weight",
    )

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        #: Blocks in use that are charged to the tenant.
        self.used = 0
        #: Free blocks that it used last, least recently used first; many are still cached.
        self.free = FreeList(())
        #: Its sequences, waiting and running, and those of them that run.
        self.sequences = 0
        self.running = 0
        self.weight = 1.0
        #: Blocks that others' new allocations leave to it.
        self.reserved = 0
        #: Most blocks that it may come to use.
        self.maximum = num_blocks
        self.seen_at = 0.0
        #: Whether it has sent a request lately.
        self.present = False

    @property
    def unused_reserve(self) -> int:
        """Reserved blocks that it doesn't use."""
        return max(0, self.reserved - self.used)

    def __repr__(self) -> str:
        return f"Account({self.name!r}, used={self.used}, free={self.free.count})"


class TenantAccounts:
    """All tenants of a pool, by name.

    Args:
        num_blocks: the pool's size.
        clock: seconds; only differences matter.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_blocks = num_blocks
        self._clock = clock
        self._expired_at = clock()
        #: Who has the blocks that were never used.
        self.nobody = Account("", num_blocks)
        self._accounts: dict[str, Account] = {}
        #: Those with a reserve.
        self.reserving: list[Account] = []
        self._total_weight = 0.0
        #: Those with free blocks, most over their share first.
        self._evictable = LazyHeap()

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, name: str) -> Account:
        """The tenant's account, opened when it has none."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name, self.num_blocks)
        return account

    def note(
        self,
        name: str,
        weight: float = 1.0,
        reserved_fraction: float = 0.0,
        max_fraction: float = 1.0,
    ) -> Account:
        """A request of the tenant came, with what it is entitled to as of now.

        Args:
            name: the tenant.
            weight: its share beside others, > 0.
            reserved_fraction: of the pool, in [0, 1]. Where all reserves are more than the pool,
                those who came first have theirs whole.
            max_fraction: of the pool, in (0, 1].
        """
        now = self._clock()
        if now - self._expired_at >= _EXPIRE_EVERY_S:
            self._expire(now)
        account = self.of(name)
        account.seen_at = now
        added = weight - (account.weight if account.present else 0.0)
        account.weight, account.present = weight, True
        account.maximum = max(1, int(max_fraction * self.num_blocks))
        self._reserve(account, int(reserved_fraction * self.num_blocks))
        if added:
            self._add_weight(added)
            self.list_free(account)
        return account

    def _add_weight(self, weight: float) -> None:
        """Somebody came, went or changed; what a reserve is worth changes with it."""
        self._total_weight += weight
        for account in self.reserving:
            self.list_free(account)

    def _reserve(self, account: Account, wanted: int) -> None:
        """Reserve as many blocks as wanted, or as others have left."""
        if not wanted and not account.reserved:
            return
        left = self.num_blocks - self.reserved_by_others(account)
        account.reserved = min(wanted, account.maximum, left)
        if account not in self.reserving:
            self.reserving.append(account)
        if not account.reserved:
            self.reserving.remove(account)
        self.list_free(account)

    def _expire(self, now: float) -> None:
        """Who hasn't been here for a while has no share and no reserve; empty accounts go."""
        self._expired_at = now
        for account in list(self._accounts.values()):
            if account.used or account.sequences or now - account.seen_at < PRESENT_S:
                continue
            if account.present:
                account.present = False
                self._reserve(account, 0)
                self._add_weight(-account.weight)
                self.list_free(account)
            if not account.free.count:
                del self._accounts[account.name]

    def forget_idle(self) -> None:
        """Who uses nothing and has nothing waiting counts as long gone."""
        self._expire(float("inf"))
        self._expired_at = self._clock()

    def reserved_by_others(self, account: Account) -> int:
        """Blocks reserved for everyone else."""
        return sum(other.reserved for other in self.reserving if other is not account)

    def kept_for_others(self, account: Account) -> int:
        """Blocks that must stay free for everyone else's reserve."""
        return sum(other.unused_reserve for other in self.reserving if other is not account)

    def unbacked(self, num_free: int) -> list[Account]:
        """Those with a reserve, when fewer blocks are free than they haven't used of it."""
        if sum(account.unused_reserve for account in self.reserving) <= num_free:
            return []
        return list(self.reserving)

    def limit(self, account: Account) -> int:
        """Most blocks that the tenant could ever use, with nobody else there."""
        return min(account.maximum, self.num_blocks - self.reserved_by_others(account))

    def fraction(self, account: Account) -> float:
        """The tenant's part of everything, by weight among those present; 0 of who isn't."""
        if not account.present or not self._total_weight:
            return 0.0
        return account.weight / self._total_weight

    def share(self, account: Account) -> float:
        """Blocks that are the tenant's by weight among those present, at least its reserve."""
        return max(account.reserved, self.num_blocks * self.fraction(account))

    def excess(self, account: Account, blocks: int) -> float:
        """How far over its share a tenant with so many blocks is: 1 is just its share."""
        share = self.share(account)
        return blocks / share if share else float("inf")

    def list_free(self, account: Account) -> None:
        """Say that the tenant has free blocks, or holds more blocks than before."""
        if account.free.count:
            self._evictable.put(account.name, self._rank(account))

    def next_evicted(self) -> tuple[Account, int]:
        """Whose free blocks are taken next, and how many at a time.

        Those that nobody ever used, then those of whoever is most over its share, counting what it
        uses and what it keeps cached; among the absent, of whoever went first. Raises IndexError
        when there is no free block.
        """
        if self.nobody.free.count:
            return self.nobody, self.nobody.free.count
        while (first := self._evictable.first()) is not None:
            name, listed = first
            account = self._accounts.get(name)
            if account is None or not account.free.count:
                self._evictable.discard(name)
                continue
            rank = self._rank(account)
            if rank != listed:
                # It has less than when it was listed; who has more is listed anew at once.
                self._evictable.put(name, rank)
                continue
            if len(self._evictable) == 1 or not self.share(account):
                return account, account.free.count
            part = (account.used + account.free.count) // _PART_AT_ONCE
            return account, min(account.free.count, max(1, part))
        raise IndexError("No block is free.")

    def _rank(self, account: Account) -> tuple[float, float]:
        """The order of eviction: the excess, but for a factor that all have in common.

        So it doesn't change with whoever else comes and goes, but for those with a reserve.
        """
        held = account.used + account.free.count
        reserve = account.reserved * self._total_weight / self.num_blocks
        weight = max(account.weight if account.present else 0.0, reserve)
        return (-held / weight if weight else float("-inf")), account.seen_at
