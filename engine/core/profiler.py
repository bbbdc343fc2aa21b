"""`TorchProfiler`: traces of the engine's computations for Perfetto or chrome://tracing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torch.profiler import profile, supported_activities

from engine.contract.errors import InvalidRequest


class TorchProfiler:
    """At most one profile of this process at a time."""

    def __init__(self) -> None:
        self._running: profile | None = None
        self._folder = Path()

    @property
    def is_running(self) -> bool:
        """Whether a profile is running."""
        return self._running is not None

    def start(self, folder: str | None = None) -> None:
        """Start profiling. `folder`: where to write the file; None: a new temporary one.

        Raises `InvalidRequest` if one is running, or the folder can't be created.
        """
        if self._running is not None:
            raise InvalidRequest("A profile runs already.", param="profile")
        try:
            self._folder = Path(folder or tempfile.mkdtemp(prefix="quire-profile-"))
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(
                f"The profile's folder can't be made: {error}", param="folder"
            ) from error
        self._running = profile(activities=supported_activities())
        self._running.start()

    def stop(self) -> str:
        """Stop; returns the file. Raises `InvalidRequest` unless one runs and can be written."""
        if self._running is None:
            raise InvalidRequest("No profile runs.", param="profile")
        running, self._running = self._running, None
        running.stop()
        try:
            with tempfile.NamedTemporaryFile(
                dir=self._folder, suffix=".json", delete=False
            ) as file:
                path = Path(file.name)
            running.export_chrome_trace(str(path))
            if not _is_complete(path):
                path.unlink()
                Path(f"{path}.tmp").unlink(missing_ok=True)
                raise OSError(f"{path} couldn't be written whole")
        except OSError as error:
            raise InvalidRequest(f"The profile is lost: {error}", param="profile") from error
        return str(path)


def _is_complete(path: Path) -> bool:
    """Whether a trace was written to its end, which holds the file's own name. Torch doesn't raise
    errors of writing, it only prints them.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        end = file.read().rstrip()
    return end.endswith(b"}") and os.fsencode(path.name) in end


# -- A replica's profile, which an operator starts and stops.


#: Maximum number of steps of a profile: each step's events stay in memory until it ends.
MAX_STEPS = 1000


class ReplicaProfiler:
    """At most one profile at a time. All calls come from the thread that runs the steps."""

    def __init__(self) -> None:
        self._profile = TorchProfiler()
        self._steps = 0

    def start(self) -> tuple[bool, str]:
        """Start a profile. Returns whether it started, and why not."""
        try:
            self._profile.start()
        except InvalidRequest as error:
            return False, error.message
        self._steps = 0
        return True, f"It ends by itself after {MAX_STEPS} steps."

    def stop(self) -> tuple[bool, str]:
        """Stop it. Returns whether one was running, and the trace file."""
        try:
            return True, self._profile.stop()
        except InvalidRequest as error:
            return False, error.message

    def step(self) -> str:
        """Count a step. Returns the result of the profile if this step ended it, else ""."""
        if not self._profile.is_running:
            return ""
        self._steps += 1
        return self.stop()[1] if self._steps >= MAX_STEPS else ""
