"""Ending a server without taking its interpreter apart.

Python clears away every module and collects what is left, a hundred thousand objects and more: some
seconds on a busy machine in which whoever has sent SIGTERM waits for nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable


def serving(work: Callable[[], object]) -> None:
    """Run `work`, all that this process is for.

    The process then ends as ever, with its status, once its threads are joined and what was
    registered to run at its end from here on has run; what would come behind that is left out.
    """
    status = 1

    def leave() -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)

    atexit.register(leave)  # first registered, last run
    try:
        work()
        status = 0
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        raise
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
        raise
