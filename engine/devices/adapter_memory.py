"""Host memory for adapters."""

from __future__ import annotations

from engine.contract.host_memory import available_memory
from engine.devices.host_memory import GIB


def adapter_bytes(part: int, most_gib: int) -> int:
    """A `part`-th of the free memory for adapters, at most so many GiB."""
    return min(available_memory() // part, most_gib * GIB)
