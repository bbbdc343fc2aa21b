"""A priority queue whose keys may change: smallest key first."""

from __future__ import annotations

import heapq
from typing import Any

_MAX_STALE = 64


class LazyHeap:
    """Names with keys. Every operation is O(log n), amortised: outdated entries are dropped when
    they surface, and all at once when they come to outnumber the others.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, str]] = []
        self._keys: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, name: str, key: Any) -> None:
        """Add a name, or change its key."""
        self._keys[name] = key
        heapq.heappush(self._heap, (key, name))
        if len(self._heap) > _MAX_STALE + 2 * len(self._keys):
            self._heap = [(key, name) for name, key in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, name: str) -> None:
        """Take a name out, if it's there."""
        self._keys.pop(name, None)

    def first(self) -> tuple[str, Any] | None:
        """The name with the smallest key, and the key; None when empty."""
        heap, keys = self._heap, self._keys
        while heap:
            key, name = heap[0]
            if name in keys and keys[name] == key:
                return name, key
            heapq.heappop(heap)
        return None
