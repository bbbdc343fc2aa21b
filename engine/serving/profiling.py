"""A replica's profile, which an operator begins and ends."""

from __future__ import annotations

from engine.contract.errors import InvalidRequest
from engine.core.profile import Profile

#: A profile that nobody stops ends by itself: each step's events stay in memory.
MAX_STEPS = 1000


class Profiler:
    """At most one profile at a time. All calls come from the thread that runs the steps."""

    def __init__(self) -> None:
        self._profile = Profile()
        self._steps = 0

    def start(self) -> tuple[bool, str]:
        """Begin: whether it could be done, and why not."""
        try:
            self._profile.start()
        except InvalidRequest as error:
            return False, error.message
        self._steps = 0
        return True, f"It ends by itself after {MAX_STEPS} steps."

    def stop(self) -> tuple[bool, str]:
        """End it: whether there was one, and the file with the trace."""
        try:
            return True, self._profile.stop()
        except InvalidRequest as error:
            return False, error.message

    def step(self) -> str:
        """Count a step; what became of the profile when that ended it, else ""."""
        if not self._profile.runs:
            return ""
        self._steps += 1
        return self.stop()[1] if self._steps >= MAX_STEPS else ""
