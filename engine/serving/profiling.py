"""A profile of what a replica computes, as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

#: A profile that nobody stops ends by itself: each step's events stay in memory.
MAX_STEPS = 1000


class Profiler:
    """At most one profile at a time. All calls come from the thread that runs the steps.

    Args:
        name: the replica's, for the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: profile | None = None
        self._steps = 0

    def start(self) -> tuple[bool, str]:
        """Begin: whether it could be done, and why not."""
        if self._running is not None:
            return False, "A profile runs already."
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._running, self._steps = profile(activities=activities), 0
        self._running.start()
        return True, f"It ends by itself after {MAX_STEPS} steps."

    def stop(self) -> tuple[bool, str]:
        """End it: whether there was one, and the file with the trace."""
        running, self._running = self._running, None
        if running is None:
            return False, "No profile runs."
        running.stop()
        folder = Path(tempfile.mkdtemp(prefix="quire-profile-"))
        path = folder / f"{self._name}-{time.strftime('%Y%m%dT%H%M%S')}.json"
        running.export_chrome_trace(str(path))
        return True, str(path)

    def step(self) -> str:
        """Count a step; the file's name when that ended the profile, else ""."""
        if self._running is None:
            return ""
        self._steps += 1
        return self.stop()[1] if self._steps >= MAX_STEPS else ""
