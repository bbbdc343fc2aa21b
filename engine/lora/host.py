"""`AdapterHost`: what the core asks of whatever has the adapters beside a model."""

from __future__ import annotations

from typing import Protocol

from engine.contract.adapters import AdapterRef
from engine.lora.store import AdapterFacts


class AdapterHost(Protocol):
    """The adapters that plans may name.

    Attributes:
        refusal: why this model has no adapters, as a sentence; "" where it may.
        num_bytes: of device memory for adapters.
        most: how many may be on the device at once; None: as many as fit.
    """

    @property
    def refusal(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def most(self) -> int | None: ...

    def load(self, ref: AdapterRef) -> AdapterFacts:
        """Bring an adapter to the device, where plans may name it. Any thread may call it.

        Raises `InvalidRequest` where it can't be had, or can't be run with this model.
        """

    def drop(self, digest: str) -> bool:
        """Let an adapter's device memory go: no later plan names it. Whether host memory has it
        still.
        """

    def forget(self, digest: str) -> None:
        """Let go of what host memory has of an adapter that isn't on the device."""

    def holds(self, digest: str) -> bool:
        """Whether host memory has an adapter that isn't on the device."""
