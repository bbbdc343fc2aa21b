"""The waiting queue: a queue for each tenant, so that one tenant can be skipped.

A policy orders the sequences of a tenant's queue, and the heads of the tenants' queues. Adding and
removing are O(log n). A sequence that finishes while it waits is dropped when it becomes the head
of its queue, or when more than half of the queue has finished: amortised O(1).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import Any

from engine.lazy_heap import LazyHeap
from engine.scheduler.request import Sequence, SequenceStatus

#: Position of a sequence in its queue; the smallest goes first. No two are equal.
SortKey = tuple[int, ...]

#: Number of finished sequences that a queue may always hold.
_MAX_FINISHED = 16


class _TenantQueue:
    """One tenant's sequences."""

    __slots__ = ("_heap", "_num_finished", "num_tokens")

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, Sequence]] = []
        self._num_finished = 0
        #: Tokens that its sequences had to compute when they were queued.
        self.num_tokens = 0

    def __len__(self) -> int:
        """Number of sequences that haven't finished."""
        return len(self._heap) - self._num_finished

    def push(self, key: SortKey, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (key, sequence))

    def head(self) -> tuple[SortKey, Sequence] | None:
        """The next sequence; finished ones before it are dropped."""
        heap = self._heap
        while heap:
            if heap[0][1].status is not SequenceStatus.FINISHED:
                return heap[0]
            heapq.heappop(heap)
            self._num_finished -= 1
        return None

    def pop(self) -> None:
        """Remove the head."""
        heapq.heappop(self._heap)

    def record_finished(self) -> None:
        """Count a queued sequence that has finished."""
        self._num_finished += 1
        if self._num_finished > _MAX_FINISHED and 2 * self._num_finished > len(self._heap):
            self._heap = [
                entry for entry in self._heap if entry[1].status is not SequenceStatus.FINISHED
            ]
            heapq.heapify(self._heap)
            self._num_finished = 0


class RequestQueue(ABC):
    """Sequences that wait to run, and the policy that orders prompts."""

    def __init__(self) -> None:
        self._count = 0
        self._pushed = 0
        #: Tokens that all waiting sequences had to compute when they were queued.
        self.num_tokens = 0
        self._queues: dict[str, _TenantQueue] = {}
        self._order = LazyHeap()
        self._skipped: set[str] = set()

    def __len__(self) -> int:
        return self._count

    @property
    def num_tenants(self) -> int:
        """Number of tenants that have waiting sequences."""
        return len(self._queues)

    # -- the policy ---------------------------------------------------------------------------

    @abstractmethod
    def _sequence_key(self, sequence: Sequence, preempted: bool) -> SortKey:
        """Position of a sequence in its tenant's queue."""

    def _tenant_key(self, tenant: str, key: SortKey) -> Any:
        """Position of a tenant whose head has this key. It may grow over time, but never shrink."""
        return key

    def _on_tenant_active(self, tenant: str) -> None:  # noqa: B027
        """Called when a tenant gets its first waiting sequence."""

    def _on_tenant_idle(self, tenant: str) -> None:  # noqa: B027
        """Called when a tenant has no more waiting sequences."""

    def _on_pop(self, tenant: str) -> None:  # noqa: B027
        """Called when the head of a tenant's queue starts."""

    #: Whether tenants have shares.
    fair = False

    def next_partial_prefill(self, partial_prefills: list[Sequence]) -> int:
        """Index of the started prompt to continue first; `partial_prefills` are in order of
        urgency.
        """
        return 0

    def precedes(self, head: Sequence, partial_prefill: Sequence) -> bool:
        """Whether the queue's head starts before a started prompt continues."""
        return False

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:  # noqa: B027
        """Count `num_tokens` of a prompt that a step computes, if the policy is fair."""

    def charge_output(self, sequence: Sequence, num_tokens: int = 1) -> None:  # noqa: B027
        """Count output tokens of a sequence, if the policy is fair."""

    def charge_rejected_drafts(self, sequence: Sequence, num_tokens: int) -> None:  # noqa: B027
        """Count computed tokens that were rejected, if the policy is fair."""

    # -- adding and removing ------------------------------------------------------------------

    def push(self, sequence: Sequence, num_cached_tokens: int = 0) -> None:
        """Queue a new sequence, `num_cached_tokens` of which currently hit the prefix cache."""
        self._push(sequence, sequence.num_tokens - num_cached_tokens, preempted=False)

    def prepend(self, sequence: Sequence) -> None:
        """Queue a preempted sequence ahead of those that never ran."""
        self._push(sequence, sequence.num_tokens, preempted=True)

    def _push(self, sequence: Sequence, num_tokens: int, *, preempted: bool) -> None:
        self._count += 1
        self._pushed += 1
        sequence.num_queued_tokens = num_tokens
        self.num_tokens += sequence.num_queued_tokens
        key, tenant = self._sequence_key(sequence, preempted), sequence.request.message.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _TenantQueue()
            self._on_tenant_active(tenant)
        queue.push(key, sequence)
        queue.num_tokens += num_tokens
        head = queue.head()
        if head is not None and head[0] == key and tenant not in self._skipped:
            self._order.put(tenant, self._tenant_key(tenant, key))

    def remove_finished(self, sequence: Sequence) -> None:
        """Remove a queued sequence that has finished (its status must be FINISHED)."""
        self._decrement(sequence)
        tenant = sequence.request.message.tenant
        queue = self._queues[tenant]
        queue.record_finished()
        if not len(queue):
            self._close(tenant)

    def peek(self) -> Sequence | None:
        """The sequence to run next, or None; skipped tenants are ignored."""
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
        """The next sequence of a tenant, skipped or not; None when none waits."""
        head = self._head(tenant)
        return head[1] if head is not None else None

    def _head(self, tenant: str) -> tuple[SortKey, Sequence] | None:
        """The head of a tenant's queue; an empty queue is removed."""
        queue = self._queues.get(tenant)
        head = queue.head() if queue is not None else None
        if head is None:
            self._close(tenant)
        return head

    def pop(self, sequence: Sequence) -> None:
        """Remove the head of a tenant's queue, which `peek` or `peek_tenant` returned."""
        tenant = sequence.request.message.tenant
        if self.peek_tenant(tenant) is not sequence:
            raise RuntimeError("Only the head of a tenant's queue can be removed.")
        self._queues[tenant].pop()
        self._decrement(sequence)
        self._on_pop(tenant)
        head = self._head(tenant)
        if head is not None and tenant not in self._skipped:
            self._order.put(tenant, self._tenant_key(tenant, head[0]))

    def _decrement(self, sequence: Sequence) -> None:
        self._count -= 1
        self.num_tokens -= sequence.num_queued_tokens
        queue = self._queues[sequence.request.message.tenant]
        queue.num_tokens -= sequence.num_queued_tokens

    def num_tenant_tokens(self, tenant: str) -> int:
        """Tokens that a tenant's waiting sequences had to compute when they were queued."""
        queue = self._queues.get(tenant)
        return 0 if queue is None else queue.num_tokens

    def _close(self, tenant: str) -> None:
        if self._queues.pop(tenant, None) is not None:
            self._on_tenant_idle(tenant)
        self._order.discard(tenant)

    # -- tenants that can't start sequences now -----------------------------------------------

    def skip_tenant(self, tenant: str) -> None:
        """Ignore a tenant until `clear_skipped`."""
        self._skipped.add(tenant)
        self._order.discard(tenant)

    def is_skipped(self, tenant: str) -> bool:
        """Whether a tenant is ignored."""
        return tenant in self._skipped

    def clear_skipped(self) -> None:
        """Consider all tenants again."""
        for tenant in self._skipped:
            head = self._head(tenant)
            if head is not None:
                self._order.put(tenant, self._tenant_key(tenant, head[0]))
        self._skipped.clear()


class FCFSQueue(RequestQueue):
    """First come, first served."""

    def _sequence_key(self, sequence: Sequence, preempted: bool) -> SortKey:
        return (0, sequence.seq_id) if preempted else (1, self._pushed)


class PriorityQueue(RequestQueue):
    """Smaller `priority` first, then by arrival. A preempted sequence keeps its position."""

    def _sequence_key(self, sequence: Sequence, preempted: bool) -> SortKey:
        return (sequence.request.priority, sequence.seq_id)
