"""The gateway processes: an ASGI server each, on one socket that `manage.py up` holds."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from django.conf import settings

from catalog.processes import ManagedProcess, spawn
from catalog.slot import backoff, describe_exit

logger = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError with the address in its text."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(2048)
    except OSError as error:
        server.close()
        raise OSError(error.errno, f"{host} port {port}: {os.strerror(error.errno or 0)}") from None
    return server


def url_of(host: str, port: int, *, tls: bool) -> str:
    """What to type into a browser on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{shown}:{port}"


class Gateways:
    """Keeps `count` gateway processes running.

    They share the listening socket, so a connection waits for the next one when a process dies, and
    none is refused while they start. `options` are `config.serve`'s.
    """

    def __init__(self, listener: socket.socket, count: int, options: dict[str, Any]) -> None:
        self._listener = listener
        self._command = [sys.executable, "-m", "config.serve", json.dumps(options)]
        self._processes: list[ManagedProcess | None] = [None] * count
        self._due = [0.0] * count
        self._failures = [0] * count

    def tick(self) -> None:
        """Start what isn't running."""
        for index, process in enumerate(self._processes):
            if process is not None and (status := process.poll()) is not None:
                lived = time.monotonic() - process.started
                self._failures[index] = 1 if lived > 10 else self._failures[index] + 1
                self._due[index] = time.monotonic() + backoff(self._failures[index])
                self._processes[index] = None
                logger.warning("gateway %d %s", index, describe_exit(status))
            if self._processes[index] is None and time.monotonic() >= self._due[index]:
                self._processes[index] = self._start(index)

    @property
    def broken(self) -> bool:
        """Whether they fail at every start."""
        return min(self._failures) >= 3

    def stop(self, grace: float) -> None:
        """Let open requests finish for `grace` seconds, then end."""
        self._listener.close()
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
        number = self._listener.fileno()
        return spawn(
            [*self._command, str(number)],
            name=f"gateway {index}",
            cwd=str(root),
            env={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            pass_fds=(number,),
        )
