"""`Profile`: what the engine computes, as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from engine.contract.errors import InvalidRequest


class Profile:
    """At most one profile of this process at a time."""

    def __init__(self) -> None:
        self._running: profile | None = None
        self._folder: str | None = None

    @property
    def runs(self) -> bool:
        """Whether one has begun and not ended."""
        return self._running is not None

    def start(self, folder: str | None = None) -> None:
        """Begin. `folder`: where the file goes; None: a new temporary one.

        Raises `InvalidRequest` while one runs.
        """
        if self._running is not None:
            raise InvalidRequest("A profile runs already.", param="profile")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._folder, self._running = folder, profile(activities=activities)
        self._running.start()

    def stop(self) -> str:
        """End; the file. Raises `InvalidRequest` unless one runs."""
        if self._running is None:
            raise InvalidRequest("No profile runs.", param="profile")
        running, self._running = self._running, None
        running.stop()
        folder = Path(self._folder or tempfile.mkdtemp(prefix="quire-profile-"))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".json", delete=False) as file:
            path = file.name
        running.export_chrome_trace(path)
        return path
