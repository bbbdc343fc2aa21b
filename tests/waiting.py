"""Waiting for what another thread or process does, and ports for those."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest


def wait_until(
    condition: Callable[[], object], what: str = "it doesn't hold", timeout_s: float = 60.0
) -> None:
    """Wait until `condition()` holds; fail with `what` when it doesn't in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
