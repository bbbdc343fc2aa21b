"""The waiting queue, in the order of a policy. Removal from the middle is lazy, so it's O(1)."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque

from engine.scheduler.sequence import Sequence, Status


class WaitingQueue(ABC):
    """Sequences that wait for a place. One that finishes while it waits is dropped lazily."""

    def __init__(self) -> None:
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @abstractmethod
    def _push(self, sequence: Sequence) -> None: ...

    @abstractmethod
    def _push_back(self, sequence: Sequence) -> None: ...

    @abstractmethod
    def _head(self) -> Sequence | None:
        """The next entry, live or dead."""

    @abstractmethod
    def _drop_head(self) -> None: ...

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:  # noqa: B027
        """A sequence starts and will compute `num_tokens` of its prompt. Fair policies count it."""

    def charge_output(self, sequence: Sequence) -> None:  # noqa: B027
        """A sequence got one output token. Fair policies count it."""

    def push(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._count += 1
        self._push(sequence)

    def push_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence ahead of those that never ran."""
        self._count += 1
        self._push_back(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Say that a queued sequence has finished (its status must be FINISHED)."""
        self._count -= 1

    def peek(self) -> Sequence | None:
        """The sequence to run next, or None."""
        while (head := self._head()) is not None and head.status is Status.FINISHED:
            self._drop_head()
        return head

    def pop(self) -> Sequence:
        """Take the sequence to run next. Raises IndexError when there is none."""
        head = self.peek()
        if head is None:
            raise IndexError("The waiting queue is empty.")
        self._drop_head()
        self._count -= 1
        return head


class FCFSQueue(WaitingQueue):
    """First come, first served."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[Sequence] = deque()

    def _push(self, sequence: Sequence) -> None:
        self._queue.append(sequence)

    def _push_back(self, sequence: Sequence) -> None:
        self._queue.appendleft(sequence)

    def _head(self) -> Sequence | None:
        return self._queue[0] if self._queue else None

    def _drop_head(self) -> None:
        self._queue.popleft()


class PriorityQueue(WaitingQueue):
    """Smaller `priority` first, then by arrival. A preempted sequence keeps its place by both."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, Sequence]] = []

    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.request.priority, sequence.seq_id, sequence))

    _push_back = _push

    def _head(self) -> Sequence | None:
        return self._heap[0][2] if self._heap else None

    def _drop_head(self) -> None:
        heapq.heappop(self._heap)
