"""Whether this gateway process is about to accept no more connections."""

from __future__ import annotations

import signal
import threading

#: Sent to gateway processes by `manage.py gateway`, before SIGTERM.
DRAIN_SIGNAL = signal.SIGUSR1
#: Set by `DRAIN_SIGNAL`: load balancers shall send nothing more, what they send is still answered.
draining = threading.Event()


def drain_on_signal() -> None:
    """Set `draining` when the signal comes. In the main thread."""
    signal.signal(DRAIN_SIGNAL, lambda *_: draining.set())
