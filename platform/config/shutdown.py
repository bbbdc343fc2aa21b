"""Ending a server without taking its interpreter apart, and within a time that is known.

Python clears away every module and collects what is left, a hundred thousand objects and more: some
seconds on a busy machine in which whoever has sent SIGTERM waits for nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: What of a thread's stack is logged: the innermost calls.
_CALLS = 6


def run_and_exit_fast(work: Callable[[], object]) -> None:
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


def exit_after_timeout(seconds: float, clock: Callable[[float], None] = time.sleep) -> None:
    """End this process in so many seconds at the latest, whatever its threads wait for: a lock of
    the database, somebody who doesn't answer. The log says what that was.
    """

    def watch() -> None:
        clock(seconds)
        logger.warning("not ended after %g s; it waits for this:\n%s", seconds, _dump_stacks())
        logging.shutdown()
        os._exit(1)

    threading.Thread(target=watch, name="quire-end", daemon=True).start()


def _dump_stacks() -> str:
    """Log the stack of each thread."""
    frames, current = sys._current_frames(), threading.get_ident()
    dump = []
    for thread in threading.enumerate():
        if thread.ident is not None and thread.ident != current and thread.ident in frames:
            calls = traceback.extract_stack(frames[thread.ident])[-_CALLS:]
            lines = [f"  {call.filename}:{call.lineno} {call.name}" for call in calls]
            dump.append("\n".join([thread.name, *lines]))
    return "\n".join(dump)
