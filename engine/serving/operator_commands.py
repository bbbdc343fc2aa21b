"""Operators' commands: adapters, pause and abort."""

from __future__ import annotations

from concurrent.futures import Future

from engine.contract.errors import QuireError
from engine.contract.messages import ABORTED_BY_OPERATOR, PAUSE_MODES, ControlRequest, TokenDelta
from engine.contract.redis_keys import base_request_id, prefilled_request_id
from engine.core.engine_core import EngineCore
from engine.core.request_admission import PauseMode
from engine.lora.adapter_cache import AdapterManager


class AdapterControls:
    """Adapter loads that operators have requested."""

    def __init__(self) -> None:
        self._loads: list[tuple[ControlRequest, Future[None]]] = []

    def begin_load(self, pool: AdapterManager, message: ControlRequest) -> str:
        """Start loading. Returns an error message, or "": then the result follows later."""
        if message.adapter is None:
            return "load_adapter needs an adapter."
        try:
            done = pool.preload(message.adapter, pin=message.pin)
        except QuireError as error:
            return error.message
        self._loads.append((message, done))
        return ""

    def pop_finished(self) -> list[tuple[ControlRequest, str]]:
        """Pop the finished loads, each with its error message or ""."""
        finished = [(message, future) for message, future in self._loads if future.done()]
        self._loads = [load for load in self._loads if load not in finished]
        return [(message, _reason(future)) for message, future in finished]


def unload(pool: AdapterManager, message: ControlRequest) -> tuple[bool, str]:
    """Unload an adapter; returns whether it was loaded, and the error message."""
    if message.adapter is None:
        return False, "unload_adapter needs an adapter."
    was_loaded = pool.unload(message.adapter.digest)
    return was_loaded, "" if was_loaded else "The adapter isn't loaded."


def _reason(future: Future[None]) -> str:
    error = future.exception()
    return error.message if isinstance(error, QuireError) else str(error or "")


class Pause(PauseMode):
    """Pause mode of a replica, and the commands that wait until nothing is running."""

    def __init__(self) -> None:
        super().__init__("The replica is paused until an operator resumes it.")
        self._waiting: list[ControlRequest] = []

    def begin(
        self, core: EngineCore, message: ControlRequest
    ) -> tuple[bool, str, list[TokenDelta]]:
        """Pause; returns success, error message, and the final deltas of aborted requests."""
        if message.mode not in PAUSE_MODES:
            return False, f"mode must be one of {', '.join(PAUSE_MODES)}.", []
        self._mode = message.mode
        deltas = abort_requests(core, []) if self._mode == "abort" else []
        if self._mode == "wait":
            self._waiting.append(message)
        return True, "", deltas

    def end(self) -> list[ControlRequest]:
        """Resume; returns the pause commands that were still waiting."""
        self._mode = ""
        return self._pop_waiting()

    def pop_completed(self, core: EngineCore) -> list[ControlRequest]:
        """Pause commands that are complete: nothing is running or being aligned any more."""
        is_busy = core.requests or core.is_aligning
        return [] if is_busy or not self._waiting else self._pop_waiting()

    def _pop_waiting(self) -> list[ControlRequest]:
        waiting, self._waiting = self._waiting, []
        return waiting


def abort_requests(core: EngineCore, request_ids: list[str]) -> list[TokenDelta]:
    """Abort these requests, including all prompts that belong to them; []: abort all requests.

    Returns the final deltas.
    """
    ids = set(request_ids)
    deltas: list[TokenDelta] = []
    for request_id in list(core.requests):
        named = prefilled_request_id(base_request_id(request_id))
        # Each prompt of a request with several is a request of its own; its id has a number
        # appended.
        if not ids or named in ids or named.rpartition("-")[0] in ids:
            deltas += core.abort(request_id)
    for delta in deltas:
        delta.stop_reason = ABORTED_BY_OPERATOR
    return deltas
