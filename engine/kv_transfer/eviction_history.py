"""`EvictionHistory`: what a larger tier would still have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

#: Evicted blocks are remembered up to this many times the tier's capacity.
GHOST_FACTOR = 4
#: Maximum number of remembered keys: each takes about 200 bytes, 200 MB in all.
MAX_GHOSTS = 1_000_000


class EvictionHistory:
    """Keys that were saved, whether or not the tier still has them; the last saved last."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: of the tier, in blocks."""
        self._max_keys = min(GHOST_FACTOR * capacity, MAX_GHOSTS)
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def record(self, keys: Iterable[bytes]) -> None:
        """Keys are saved (again)."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forget all keys."""
        self._keys.clear()
