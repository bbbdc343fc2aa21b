"""An operator's words about adapters, and what a heartbeat says of them."""

from __future__ import annotations

from concurrent.futures import Future

from engine.contract.errors import QuireError
from engine.contract.protocol import Control
from engine.core.adapter_pool import AdapterPool


class AdapterControls:
    """Loads that operators wait for."""

    def __init__(self) -> None:
        self._loads: list[tuple[Control, Future[None]]] = []

    def begin_load(self, pool: AdapterPool, message: Control) -> str:
        """Start to load; why not, or "": then `settled` has the answer some time."""
        if message.adapter is None:
            return "load_adapter needs an adapter."
        try:
            done = pool.preload(message.adapter, pin=message.pin)
        except QuireError as error:
            return error.message
        self._loads.append((message, done))
        return ""

    def settled(self) -> list[tuple[Control, str]]:
        """Loads that have ended since, each with why it failed, or ""."""
        over = [(message, done) for message, done in self._loads if done.done()]
        self._loads = [each for each in self._loads if each not in over]
        return [(message, _reason(done)) for message, done in over]


def unload(pool: AdapterPool, message: Control) -> tuple[bool, str]:
    """Let an adapter go: (whether it was there, what to say)."""
    if message.adapter is None:
        return False, "unload_adapter needs an adapter."
    there = pool.unload(message.adapter.digest)
    return there, "" if there else "The adapter isn't loaded."


def _reason(done: Future[None]) -> str:
    error = done.exception()
    return error.message if isinstance(error, QuireError) else str(error or "")
