"""`AdapterEntry`: an adapter in an engine's pool."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.contract.adapters import AdapterRef
from engine.lora.store import AdapterFacts


@dataclass(slots=True)
class AdapterEntry:
    """An adapter on the device, or on its way there.

    Attributes:
        ref: as it was asked for last.
        num_bytes: of device memory; before it is there, what its file has.
        loading: what comes of it; None once it's there.
        users: ids of requests that go through it.
        pinned: never driven out.
        unloading: it leaves as soon as nobody uses it.
        used_at: the pool's clock when it was asked for last.
        left_at: monotonic seconds when it was used last.
        vocab_size: of its rows, where it brings tokens; 0: the model's.
    """

    ref: AdapterRef
    num_bytes: int
    loading: Future[AdapterFacts] | None = None
    rank: int = 0
    load_seconds: float = 0.0
    users: set[str] = field(default_factory=set)
    pinned: bool = False
    unloading: bool = False
    used_at: int = 0
    left_at: float = field(default_factory=time.monotonic)
    vocab_size: int = 0

    @property
    def is_free(self) -> bool:
        """Whether its room may be had."""
        return self.loading is None and not self.users and not self.pinned
