"""`LoadedLoRAs`: adapters that a program loads to the device, by its own numbers."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.errors import InvalidRequest
from engine.contract.lora import AdapterRef, LoRARequest
from engine.lora.adapter_cache import AdapterManager


class LoadedLoRAs:
    """The adapters of vLLM's `add_lora` and related methods. A number only refers to content."""

    def __init__(self, pool: AdapterManager, step: Callable[[], None]) -> None:
        """`step` runs a step of the engine, in which loading advances."""
        self._pool, self._step = pool, step
        self._refs: dict[int, AdapterRef] = {}
        self._pinned: set[int] = set()

    def add(self, request: LoRARequest) -> bool:
        """Load an adapter to the device. Returns False if it is already loaded by this number.

        Raises `InvalidRequest` if it can't be loaded.
        """
        ref, number = request.ref(), request.lora_int_id
        if number in self.numbers() and self._refs[number].digest == ref.digest:
            return False
        self._load(ref, pin=False)
        self._refs[number] = ref
        self._pinned.discard(number)
        return True

    def pin(self, number: int) -> bool:
        """Pin an adapter on the device, and reload it if it was evicted.

        Raises `InvalidRequest` for a number that wasn't passed to `add`.
        """
        if number not in self._refs:
            raise InvalidRequest(f"No adapter was added as {number}.", param="lora_id")
        self._load(self._refs[number], pin=True)
        self._pinned.add(number)
        return True

    def remove(self, number: int) -> bool:
        """Remove an adapter once no request uses it. Returns False if it isn't loaded."""
        self._pinned.discard(number)
        ref = self._refs.pop(number, None)
        return ref is not None and self._pool.unload(ref.digest)

    def numbers(self) -> set[int]:
        """Return the numbers of added adapters on the device."""
        on_device = {state.digest for state in self._pool.states() if state.tier == "device"}
        return {number for number, ref in self._refs.items() if ref.digest in on_device}

    def _load(self, ref: AdapterRef, *, pin: bool) -> None:
        pinned = {self._refs[number].digest for number in self._pinned}
        done = self._pool.preload(ref, pin=pin or ref.digest in pinned)
        while not done.done():
            self._step()
        done.result()
