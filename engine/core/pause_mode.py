"""`PauseMode`: how an engine stands still, for whoever lets requests in and runs its steps."""

from __future__ import annotations

from engine.contract.errors import EnginePaused


class PauseMode:
    """Whether an engine is paused, and how: one of `PAUSE_MODES`, or "" while it isn't.

    `refusal` is what a request is told that may not come in.
    """

    def __init__(self, refusal: str) -> None:
        self._mode, self._refusal = "", refusal

    def __bool__(self) -> bool:
        """Whether it is paused at all."""
        return bool(self._mode)

    @property
    def frozen(self) -> bool:
        """Whether not even a step may run."""
        return self._mode == "keep"

    def check_new(self) -> None:
        """Raise `EnginePaused` unless a new request may come in."""
        if self._mode in ("abort", "wait"):
            raise EnginePaused(self._refusal)
