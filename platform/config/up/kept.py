"""Processes that are started again whenever they end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from django.conf import settings

from catalog.frozen import end_when_frozen
from catalog.processes import ManagedProcess, spawn
from catalog.slot import backoff, describe_exit

logger = logging.getLogger(__name__)


class KeptProcesses:
    """Keeps `count` processes of one Python command running.

    Args:
        name: for the log. command: the arguments behind `python`. pass_fds: what they inherit.
        on_death: called with the id of each process that has ended.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        count: int = 1,
        pass_fds: Sequence[int] = (),
        on_death: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._name, self._pass_fds, self._on_death = name, tuple(pass_fds), on_death
        self._command = [sys.executable, *command]
        self._processes: list[ManagedProcess | None] = [None] * count
        self._due = [0.0] * count
        self._failures = [0] * count

    def tick(self) -> None:
        """Start what isn't running."""
        for index, process in enumerate(self._processes):
            if process is not None and (status := process.poll()) is not None:
                lived = time.monotonic() - process.started
                self._failures[index] = 0 if lived > 10 else self._failures[index]
                self._note_failure(index)
                self._processes[index] = None
                logger.warning("%s %d %s", self._name, index, describe_exit(status))
                self._on_death(process.pid)
            if self._processes[index] is None and time.monotonic() >= self._due[index]:
                try:
                    self._processes[index] = self._start(index)
                except (OSError, subprocess.SubprocessError) as error:
                    # No memory for one more process, say: what runs beside it goes on.
                    logger.warning("%s can't be started: %s", self._name, error)
                    self._note_failure(index)

    def _note_failure(self, index: int) -> None:
        self._failures[index] += 1
        self._due[index] = time.monotonic() + backoff(self._failures[index])

    @property
    def broken(self) -> bool:
        """Whether they fail at every start."""
        return min(self._failures) >= 3

    def stop(self, grace: float) -> None:
        """Let them finish for `grace` seconds, then end."""
        running = [process for process in self._processes if process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + grace
        for process in running:
            process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()

    def kill(self) -> None:
        """End at once."""
        for process in self._processes:
            if process is not None:
                process.kill()

    def _start(self, index: int) -> ManagedProcess:
        root = Path(settings.BASE_DIR)
        paths = [str(root), str(root / "platform"), os.environ.get("PYTHONPATH", "")]
        process = spawn(
            self._command,
            name=f"{self._name} {index}",
            cwd=str(root),
            env={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            pass_fds=self._pass_fds,
        )
        # It would keep its clients for ever, and perhaps the database's lock.
        end_when_frozen(process)
        return process
