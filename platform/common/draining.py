"""Graceful shutdown of a gateway process: load balancers are notified first, answers finish."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

#: Sent to gateway processes by `manage.py gateway`, before SIGTERM.
DRAIN_SIGNAL = signal.SIGUSR1
#: Set by `DRAIN_SIGNAL`: load balancers should send nothing more; requests are still answered.
draining = threading.Event()
#: Seconds after the grace period in which a gateway aborts its remaining requests and records
#: their usage, before it is killed.
SETTLE_S = 6.0
_IS_BUSY = "quire.is_busy"


def drain_on_signal() -> None:
    """Set `draining` when the signal arrives. Call it in the main thread."""
    signal.signal(DRAIN_SIGNAL, lambda *_: draining.set())


def keep_open_while(scope: MutableMapping[str, Any], is_busy: Callable[[], bool]) -> None:
    """Keep an ASGI socket open during the gateway's grace period while it is busy."""
    scope.setdefault("state", {})[_IS_BUSY] = is_busy


def is_busy(state: Mapping[str, Any]) -> bool:
    """Whether closing a socket with this ASGI scope `state` would cut off an answer."""
    return _IS_BUSY in state and bool(state[_IS_BUSY]())
