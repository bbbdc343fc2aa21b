"""The waiting queue: a line for each tenant, so that one tenant's can be passed over.

A policy says how sequences stand in a line, and how the lines' heads stand among each other. Adding
and taking are O(log n) and nothing walks the queue: what finishes while it waits is dropped when it
comes to the head of its line.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import Any

from engine.lazy_heap import LazyHeap
from engine.scheduler.sequence import Sequence, Status

#: How a sequence stands in its line; the smallest goes first. No two are equal.
Place = tuple[int, ...]


class WaitingQueue(ABC):
    """Sequences that wait to run."""

    def __init__(self) -> None:
        self._count = 0
        self._pushed = 0
        #: Tokens that all that wait were to compute when they were queued.
        self.num_tokens = 0
        self._lines: dict[str, list[tuple[Place, Sequence]]] = {}
        self._order = LazyHeap()
        self._held: set[str] = set()

    def __len__(self) -> int:
        return self._count

    # -- the policy ---------------------------------------------------------------------------

    @abstractmethod
    def _place(self, sequence: Sequence, preempted: bool) -> Place:
        """Where the sequence stands in its tenant's line."""

    def _rank(self, tenant: str, place: Place) -> Any:
        """Where a line stands whose head is at `place`. May grow by itself, but never shrink."""
        return place

    def _opened(self, tenant: str) -> None:  # noqa: B027
        """A tenant that had nothing waiting has something now."""

    def _closed(self, tenant: str) -> None:  # noqa: B027
        """A tenant has nothing waiting any more."""

    def _took(self, tenant: str) -> None:  # noqa: B027
        """The head of a tenant's line starts."""

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:  # noqa: B027
        """A sequence starts and will compute `num_tokens` of its prompt. Fair policies count it."""

    def charge_output(self, sequence: Sequence) -> None:  # noqa: B027
        """A sequence got one output token. Fair policies count it."""

    # -- coming and going ---------------------------------------------------------------------

    def push(self, sequence: Sequence, num_cached_tokens: int = 0) -> None:
        """Queue a new sequence, of whose tokens so many would hit the prefix cache by now."""
        self._push(sequence, sequence.num_tokens - num_cached_tokens, preempted=False)

    def push_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence ahead of those that never ran."""
        self._push(sequence, sequence.num_tokens, preempted=True)

    def _push(self, sequence: Sequence, num_tokens: int, *, preempted: bool) -> None:
        self._count += 1
        self._pushed += 1
        sequence.num_queued_tokens = num_tokens
        self.num_tokens += sequence.num_queued_tokens
        place, tenant = self._place(sequence, preempted), sequence.request.message.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = []
            self._opened(tenant)
        heapq.heappush(line, (place, sequence))
        if line[0][0] == place and tenant not in self._held:
            self._order.put(tenant, self._rank(tenant, place))

    def discard(self, sequence: Sequence) -> None:
        """Say that a queued sequence has finished (its status must be FINISHED)."""
        self._uncount(sequence)

    def peek(self) -> Sequence | None:
        """The sequence to run next, or None; tenants that are held are passed over."""
        while (first := self._order.first()) is not None:
            tenant, listed = first
            head = self.head_of(tenant)
            if head is None:
                continue
            rank = self._rank(tenant, self._lines[tenant][0][0])
            if rank == listed:
                return head
            self._order.put(tenant, rank)
        return None

    def head_of(self, tenant: str) -> Sequence | None:
        """The tenant's sequence to run next, held or not; None when it has none waiting."""
        line = self._lines.get(tenant)
        while line:
            sequence = line[0][1]
            if sequence.status is not Status.FINISHED:
                return sequence
            heapq.heappop(line)
        self._close(tenant)
        return None

    def take(self, sequence: Sequence) -> None:
        """Take the head of a tenant's line, as `peek` or `head_of` gave it."""
        tenant = sequence.request.message.tenant
        if self.head_of(tenant) is not sequence:
            raise RuntimeError("Only the head of a line can be taken.")
        heapq.heappop(self._lines[tenant])
        self._uncount(sequence)
        self._took(tenant)
        if not self._lines[tenant]:
            self._close(tenant)
        elif tenant not in self._held:
            self._order.put(tenant, self._rank(tenant, self._lines[tenant][0][0]))

    def _uncount(self, sequence: Sequence) -> None:
        self._count -= 1
        self.num_tokens -= sequence.num_queued_tokens

    def _close(self, tenant: str) -> None:
        if self._lines.pop(tenant, None) is not None:
            self._closed(tenant)
        self._order.discard(tenant)

    # -- tenants that can't start anything now ------------------------------------------------

    def hold(self, tenant: str) -> None:
        """Pass over a tenant until `release`."""
        self._held.add(tenant)
        self._order.discard(tenant)

    def release(self) -> None:
        """Pass over nobody any more."""
        for tenant in self._held:
            line = self._lines.get(tenant)
            if line:
                self._order.put(tenant, self._rank(tenant, line[0][0]))
        self._held.clear()


class FCFSQueue(WaitingQueue):
    """First come, first served."""

    def _place(self, sequence: Sequence, preempted: bool) -> Place:
        return (0, sequence.seq_id) if preempted else (1, self._pushed)


class PriorityQueue(WaitingQueue):
    """Smaller `priority` first, then by arrival. A preempted sequence keeps its place by both."""

    def _place(self, sequence: Sequence, preempted: bool) -> Place:
        return (sequence.request.priority, sequence.seq_id)
