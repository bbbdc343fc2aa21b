"""`AdapterShares`: how much of an engine's memory for adapters each owner may have in use."""

from __future__ import annotations

import time
from collections.abc import Iterable

from engine.core.adapter_entry import AdapterEntry

#: Seconds without a request after which an adapter's memory is given back, which takes milliseconds
#: to a second to read again, and after which an owner isn't counted any more.
IDLE_S = 600.0
#: While several owners ask, the part that one's adapters in use leave to the others: of bytes, and
#: of places, one of them at least.
_LEFT = 4


class AdapterShares:
    """Who asked lately. One owner may use all that there is; several leave each other a part, so
    that a flood of one's adapters, however long their requests run, doesn't keep another's out.
    """

    def __init__(self) -> None:
        #: When each owner asked last, in monotonic seconds.
        self._asked: dict[str, float] = {}

    def note(self, owner: str) -> None:
        """An owner's request came."""
        self._asked[owner] = time.monotonic()

    def forget(self, now: float) -> None:
        """Owners that asked long ago aren't remembered."""
        self._asked = {owner: at for owner, at in self._asked.items() if now - at < IDLE_S}

    def holds(
        self, owner: str, in_use: Iterable[AdapterEntry], capacity: int, most: int | None
    ) -> bool:
        """Whether an owner may have one more beside those that it has in use.

        `capacity`: bytes. `most`: adapters; None: as many as fit.
        """
        now = time.monotonic()
        if all(now - at >= IDLE_S for other, at in self._asked.items() if other != owner):
            return True
        sizes = [entry.num_bytes for entry in in_use]
        if not sizes:
            return True
        places = most is None or len(sizes) < most - max(1, most // _LEFT)
        return places and sum(sizes) < capacity - capacity // _LEFT
