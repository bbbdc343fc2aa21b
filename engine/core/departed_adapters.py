"""`DepartedAdapters`: adapters that left the device, as far as something is still told of them."""

from __future__ import annotations

from collections.abc import Callable, Container

import msgspec

from engine.contract.adapters import AdapterState
from engine.core.adapter_entry import AdapterEntry
from engine.core.adapter_shares import IDLE_S

#: Adapters that left the device, of which something is still told.
_MOST_REMEMBERED = 256


class DepartedAdapters:
    """Which of them host memory still has, until nobody has asked for them for long.

    Args:
        holds: whether host memory has an adapter still: it makes room for later ones.
        forget: lets what host memory has of an adapter go; None: it keeps none.
    """

    def __init__(
        self, holds: Callable[[str], bool] | None, forget: Callable[[str], None] | None
    ) -> None:
        self._holds, self._forget = holds, forget
        self._known: dict[str, AdapterState] = {}
        #: What is in host memory, and when it was used last.
        self._in_host: dict[str, float] = {}

    def add(self, entry: AdapterEntry, *, in_host: bool) -> None:
        """An adapter has left the device; of those, the last hundreds are remembered."""
        digest = entry.ref.digest
        if in_host:
            self._in_host[digest] = entry.left_at
        self._known.pop(digest, None)
        self._known[digest] = AdapterState(
            digest=digest,
            name=entry.ref.name,
            rank=entry.rank,
            tier="host" if in_host else "disk",
            num_bytes=entry.num_bytes,
            load_seconds=entry.load_seconds,
        )
        while len(self._known) > _MOST_REMEMBERED:
            del self._known[next(iter(self._known))]
        if self._holds is not None:
            for other in [each for each in self._in_host if not self._holds(each)]:
                self._left_host(other)

    def take_back(self, digest: str) -> None:
        """An adapter is on its way to the device again."""
        self._in_host.pop(digest, None)

    def give_back_idle(self, now: float) -> None:
        """Let those leave host memory that no request has used for long; `now`: monotonic."""
        for digest, left_at in list(self._in_host.items()):
            if now - left_at >= IDLE_S:
                self._left_host(digest)
                if self._forget is not None:
                    self._forget(digest)

    def states(self, here: Container[str]) -> list[AdapterState]:
        """All that are remembered, but for those on the device."""
        return [each for each in list(self._known.values()) if each.digest not in here]

    def _left_host(self, digest: str) -> None:
        del self._in_host[digest]
        if (known := self._known.get(digest)) is not None:
            self._known[digest] = msgspec.structs.replace(known, tier="disk")
