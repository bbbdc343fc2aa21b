"""The waiting queue: a line for each tenant, so that one tenant's can be passed over.

A policy says how sequences stand in a line, and how the lines' heads stand among each other. Adding
and taking are O(log n). What finishes while it waits is dropped when it comes to the head of its
line, or when it and its like are most of the line: so a line that stands still keeps no more of the
dead than of the living, and dropping costs O(1) each over time.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import Any

from engine.lazy_heap import LazyHeap
from engine.scheduler.request import Sequence, SequenceStatus

#: How a sequence stands in its line; the smallest goes first. No two are equal.
SortKey = tuple[int, ...]


#: A line keeps so many of the dead without a look at how many live.
_FEW_DEAD = 16


class _TenantQueue:
    """One tenant's sequences."""

    __slots__ = ("_dead", "_heap", "num_tokens")

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, Sequence]] = []
        self._dead = 0
        #: That its sequences were to compute when they were queued.
        self.num_tokens = 0

    def __len__(self) -> int:
        """Those that live."""
        return len(self._heap) - self._dead

    def push(self, place: SortKey, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (place, sequence))

    def head(self) -> tuple[SortKey, Sequence] | None:
        """Who is next among the living; the dead before it are dropped."""
        heap = self._heap
        while heap:
            if heap[0][1].status is not SequenceStatus.FINISHED:
                return heap[0]
            heapq.heappop(heap)
            self._dead -= 1
        return None

    def pop(self) -> None:
        """Take the head."""
        heapq.heappop(self._heap)

    def note_dead(self) -> None:
        """One of its sequences has finished."""
        self._dead += 1
        if self._dead > _FEW_DEAD and 2 * self._dead > len(self._heap):
            self._heap = [
                each for each in self._heap if each[1].status is not SequenceStatus.FINISHED
            ]
            heapq.heapify(self._heap)
            self._dead = 0


class RequestQueue(ABC):
    """Sequences that wait to run."""

    def __init__(self) -> None:
        self._count = 0
        self._pushed = 0
        #: Tokens that all that wait were to compute when they were queued.
        self.num_tokens = 0
        self._lines: dict[str, _TenantQueue] = {}
        self._order = LazyHeap()
        self._held: set[str] = set()

    def __len__(self) -> int:
        return self._count

    @property
    def num_tenants(self) -> int:
        """Tenants that have something waiting."""
        return len(self._lines)

    # -- the policy ---------------------------------------------------------------------------

    @abstractmethod
    def _sequence_key(self, sequence: Sequence, preempted: bool) -> SortKey:
        """Where the sequence stands in its tenant's line."""

    def _tenant_key(self, tenant: str, place: SortKey) -> Any:
        """Where a line stands whose head is at `place`. May grow by itself, but never shrink."""
        return place

    def _on_tenant_active(self, tenant: str) -> None:  # noqa: B027
        """A tenant that had nothing waiting has something now."""

    def _on_tenant_idle(self, tenant: str) -> None:  # noqa: B027
        """A tenant has nothing waiting any more."""

    def _on_pop(self, tenant: str) -> None:  # noqa: B027
        """The head of a tenant's line starts."""

    #: Whether tenants have shares.
    fair = False

    def next_partial_prefill(self, begun: list[Sequence]) -> int:
        """Which of some prompts that have begun goes on first; they are in order of urgency."""
        return 0

    def precedes(self, head: Sequence, begun: Sequence) -> bool:
        """Whether the queue's head starts before a prompt that has begun goes on."""
        return False

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:  # noqa: B027
        """A step computes so many more tokens of a prompt. Fair policies count it."""

    def charge_output(self, sequence: Sequence, num_tokens: int = 1) -> None:  # noqa: B027
        """A sequence got output tokens. Fair policies count them."""

    def charge_rejected_drafts(self, sequence: Sequence, num_tokens: int) -> None:  # noqa: B027
        """A step computed tokens of a sequence that it didn't get. Fair policies count them."""

    # -- coming and going ---------------------------------------------------------------------

    def push(self, sequence: Sequence, num_cached_tokens: int = 0) -> None:
        """Queue a new sequence, of whose tokens so many would hit the prefix cache by now."""
        self._push(sequence, sequence.num_tokens - num_cached_tokens, preempted=False)

    def prepend(self, sequence: Sequence) -> None:
        """Queue a preempted sequence ahead of those that never ran."""
        self._push(sequence, sequence.num_tokens, preempted=True)

    def _push(self, sequence: Sequence, num_tokens: int, *, preempted: bool) -> None:
        self._count += 1
        self._pushed += 1
        sequence.num_queued_tokens = num_tokens
        self.num_tokens += sequence.num_queued_tokens
        place, tenant = self._sequence_key(sequence, preempted), sequence.request.message.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _TenantQueue()
            self._on_tenant_active(tenant)
        line.push(place, sequence)
        line.num_tokens += num_tokens
        head = line.head()
        if head is not None and head[0] == place and tenant not in self._held:
            self._order.put(tenant, self._tenant_key(tenant, place))

    def remove_finished(self, sequence: Sequence) -> None:
        """Say that a queued sequence has finished (its status must be FINISHED)."""
        self._decrement(sequence)
        tenant = sequence.request.message.tenant
        line = self._lines[tenant]
        line.note_dead()
        if not len(line):
            self._close(tenant)

    def peek(self) -> Sequence | None:
        """The sequence to run next, or None; tenants that are held are passed over."""
        while (first := self._order.first()) is not None:
            tenant, listed = first
            head = self._head(tenant)
            if head is None:
                continue
            rank = self._tenant_key(tenant, head[0])
            if rank == listed:
                return head[1]
            self._order.put(tenant, rank)
        return None

    def peek_tenant(self, tenant: str) -> Sequence | None:
        """The tenant's sequence to run next, held or not; None when it has none waiting."""
        head = self._head(tenant)
        return head[1] if head is not None else None

    def _head(self, tenant: str) -> tuple[SortKey, Sequence] | None:
        """The head of a tenant's line; one where nobody lives is closed."""
        line = self._lines.get(tenant)
        head = line.head() if line is not None else None
        if head is None:
            self._close(tenant)
        return head

    def pop(self, sequence: Sequence) -> None:
        """Take the head of a tenant's line, as `peek` or `peek_tenant` gave it."""
        tenant = sequence.request.message.tenant
        if self.peek_tenant(tenant) is not sequence:
            raise RuntimeError("Only the head of a line can be taken.")
        self._lines[tenant].pop()
        self._decrement(sequence)
        self._on_pop(tenant)
        head = self._head(tenant)
        if head is not None and tenant not in self._held:
            self._order.put(tenant, self._tenant_key(tenant, head[0]))

    def _decrement(self, sequence: Sequence) -> None:
        self._count -= 1
        self.num_tokens -= sequence.num_queued_tokens
        line = self._lines[sequence.request.message.tenant]
        line.num_tokens -= sequence.num_queued_tokens

    def num_tenant_tokens(self, tenant: str) -> int:
        """`num_tokens` of one tenant."""
        line = self._lines.get(tenant)
        return 0 if line is None else line.num_tokens

    def _close(self, tenant: str) -> None:
        if self._lines.pop(tenant, None) is not None:
            self._on_tenant_idle(tenant)
        self._order.discard(tenant)

    # -- tenants that can't start anything now ------------------------------------------------

    def skip_tenant(self, tenant: str) -> None:
        """Pass over a tenant until `clear_skipped`."""
        self._held.add(tenant)
        self._order.discard(tenant)

    def clear_skipped(self) -> None:
        """Pass over nobody any more."""
        for tenant in self._held:
            head = self._head(tenant)
            if head is not None:
                self._order.put(tenant, self._tenant_key(tenant, head[0]))
        self._held.clear()


class FCFSQueue(RequestQueue):
    """First come, first served."""

    def _sequence_key(self, sequence: Sequence, preempted: bool) -> SortKey:
        return (0, sequence.seq_id) if preempted else (1, self._pushed)


class PriorityQueue(RequestQueue):
    """Smaller `priority` first, then by arrival. A preempted sequence keeps its place by both."""

    def _sequence_key(self, sequence: Sequence, preempted: bool) -> SortKey:
        return (sequence.request.priority, sequence.seq_id)
