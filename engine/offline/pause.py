"""`Pause`: an engine of this process that stands still for its caller."""

from __future__ import annotations

from concurrent.futures import Future

from engine.contract.errors import InvalidRequest
from engine.contract.protocol import PAUSE_MODES
from engine.core.pause_mode import PauseMode


class Pause(PauseMode):
    """Whether it stands still, how, and who waits to hear that nothing runs any more. Used by the
    engine's thread.
    """

    def __init__(self) -> None:
        super().__init__("The engine is paused until resume_generation.")
        self._waiting: list[Future[None]] = []

    def begin(self, mode: str) -> Future[None]:
        """Stand still; what is done once nothing runs any more. Raises `InvalidRequest`."""
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}.", param="mode")
        self._mode = mode
        settled: Future[None] = Future()
        self._waiting.append(settled)
        return settled

    def settle(self, unfinished: bool) -> None:
        """Tell who waits, unless something still runs."""
        if not unfinished:
            self._tell()

    def end(self) -> None:
        """Go on; nobody needs to wait for anything."""
        self._mode = ""
        self._tell()

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        for settled in waiting:
            if not settled.cancelled():
                settled.set_result(None)
