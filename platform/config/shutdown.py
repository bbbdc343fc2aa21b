"""Exits a server fast: without Python's clean-up of modules, and within a known time.

At exit Python clears all modules and collects a hundred thousand objects and more. On a busy
machine that takes seconds, in which the sender of SIGTERM waits for nothing.
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

#: Maximum number of innermost frames logged for each thread's stack.
_CALLS = 6


def run_and_exit_fast(work: Callable[[], object]) -> None:
    """Run `work`, the only purpose of this process, then exit without the interpreter's clean-up.

    The process exits with its usual status after joining its threads and running the `atexit`
    handlers registered from here on. Earlier handlers and the clean-up of modules are skipped.
    """
    status = 1

    def leave() -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)

    atexit.register(leave)  # handlers run in reverse order, so this one runs last
    try:
        work()
        status = 0
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        raise
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
        raise


def exit_after_timeout(seconds: float) -> None:
    """Exit this process after at most `seconds`, even if its threads still wait, for example for a
    database lock or a peer that doesn't answer. Logs their stacks.
    """

    def watch() -> None:
        time.sleep(seconds)
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
