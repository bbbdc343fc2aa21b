"""How a gateway process ends: load balancers learn of it first, and answers may finish."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

#: Sent to gateway processes by `manage.py gateway`, before SIGTERM.
DRAIN_SIGNAL = signal.SIGUSR1
#: Set by `DRAIN_SIGNAL`: load balancers shall send nothing more, what they send is still answered.
draining = threading.Event()
#: Seconds for a gateway to abort, after its grace, what still runs and to write its usage. Then it
#: is killed.
SETTLE_S = 6.0
_IS_BUSY = "quire.is_busy"


def drain_on_signal() -> None:
    """Set `draining` when the signal comes. In the main thread."""
    signal.signal(DRAIN_SIGNAL, lambda *_: draining.set())


def keep_open_while(scope: MutableMapping[str, Any], is_busy: Callable[[], bool]) -> None:
    """Keep an ASGI socket open at the gateway's end, within its grace, while it's busy."""
    scope.setdefault("state", {})[_IS_BUSY] = is_busy


def is_busy(state: Mapping[str, Any]) -> bool:
    """Whether a socket of this `state` of its ASGI scope would cut an answer if it closed."""
    return _IS_BUSY in state and bool(state[_IS_BUSY]())
