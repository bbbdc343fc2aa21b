"""Replicas of `manage.py up` that are copies of a process with torch, as children of its own.

Where replicas are killed again and again, half of all that is computed would be the same imports.
An app in the settings of such an instance; only where replicas are started is another.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from django.apps import AppConfig

from catalog.processes import ManagedProcess, spawn
from tests.copies import Nursery
from tests.nursery import IMPORTS


class QuickReplicas(AppConfig):
    """Puts `Copies` in the place of `spawn`, in the process that starts replicas."""

    name, label = "tests.e2e", "quick_replicas"

    def ready(self) -> None:
        """When all models are there."""
        if sys.argv[1:2] == ["up"]:
            from catalog import slot

            slot.spawn = Copies().spawn  # type: ignore[assignment]


class Copies:
    """Begins a nursery with the first replica."""

    def __init__(self) -> None:
        self._nursery: Nursery | None = None

    def spawn(
        self, command: Sequence[str], *, name: str, death_signal: int, **more: Any
    ) -> ManagedProcess:
        """As `catalog.processes.spawn`."""
        if self._nursery is None:
            self._nursery = _begun()
        return ManagedProcess(name, _Copy(self._nursery, command, death_signal, **more))


def _begun() -> Nursery:
    ours, its = socket.socketpair()
    with its:
        spawn(
            [sys.executable, "-m", "tests.nursery", str(its.fileno())],
            name="nursery",
            env={IMPORTS: "engine.serving.service"},
            pass_fds=[its.fileno()],
        )
    return Nursery(ours)


class _Copy(subprocess.Popen[bytes]):
    """A copy that begins as `command`, in a group of its own, and gets `death` when we end.

    Its command line is the engine's: so it's found in a list of processes.
    """

    def __init__(
        self,
        nursery: Nursery,
        command: Sequence[str],
        death: int,
        env: Mapping[str, str],
        **more: Any,
    ) -> None:
        self._bear = partial(nursery.bear, death=death, title="engine.serving", session=1)
        super().__init__(command, stdin=subprocess.DEVNULL, env={**os.environ, **env}, **more)

    def _execute_child(  # type: ignore[override]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any,
        cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: Any, *rest: Any,
    ) -> None:  # fmt: skip
        self._bear(self, args, rest[:6], pass_fds, cwd=cwd, env=env)
