"""A replica that stands still at an operator's word."""

from __future__ import annotations

from engine.contract.protocol import (
    BY_OPERATOR,
    PAUSE_MODES,
    Control,
    TokenDelta,
    first_attempt,
)
from engine.core.engine_core import EngineCore
from engine.core.pause_mode import PauseMode


class Pause(PauseMode):
    """Whether a replica is paused, how, and who waits to hear that nothing runs any more."""

    def __init__(self) -> None:
        super().__init__("The replica is paused until an operator resumes it.")
        self._waiting: list[Control] = []

    def begin(self, core: EngineCore, message: Control) -> tuple[bool, str, list[TokenDelta]]:
        """Pause: whether it could be done, why not, and what aborted requests end with."""
        if message.mode not in PAUSE_MODES:
            return False, f"mode must be one of {', '.join(PAUSE_MODES)}.", []
        self._mode = message.mode
        deltas = abort_requests(core, []) if self._mode == "abort" else []
        if self._mode == "wait":
            self._waiting.append(message)
        return True, "", deltas

    def end(self) -> list[Control]:
        """Resume; pauses that nobody needs to wait for any more."""
        self._mode = ""
        return self._take_waiting()

    def settled(self, core: EngineCore) -> list[Control]:
        """Pauses that are complete by now: nothing runs."""
        return [] if core.requests or not self._waiting else self._take_waiting()

    def _take_waiting(self) -> list[Control]:
        waiting, self._waiting = self._waiting, []
        return waiting


def abort_requests(core: EngineCore, request_ids: list[str]) -> list[TokenDelta]:
    """Abort these requests, with all prompts that came with them; [] for every one there is.

    Returns the final deltas.
    """
    wanted = set(request_ids)
    deltas: list[TokenDelta] = []
    for request_id in list(core.requests):
        named = first_attempt(request_id)
        # Of several prompts each is a request of its own, numbered behind the client's id.
        if not wanted or named in wanted or named.rpartition("-")[0] in wanted:
            deltas += core.abort(request_id)
    for delta in deltas:
        delta.stop_reason = BY_OPERATOR
    return deltas
