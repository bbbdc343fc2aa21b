"""A server's end: its threads and exit handlers have their turn, the interpreter's clearing away
has not.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.console.live import ROOT

PROCESS = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, {platform!r})
from config.quick_exit import serving

class Cleared:
    def __del__(self): print("cleared", flush=True)

kept = Cleared()
kept.itself = kept

def work():
    atexit.register(print, "handler")
    ThreadPoolExecutor().submit(lambda: (time.sleep(0.2), print("thread")))
    sys.stdout.write("worked\\n")
    {ends}

serving(work)
"""


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('why')", 1),
        ("raise ValueError", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_threads_and_handlers_end_and_nothing_is_cleared_away(ends: str, status: int) -> None:
    script = PROCESS.format(platform=str(ROOT / "platform"), ends=ends)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (status, ["worked", "thread", "handler"])
    assert ("ValueError" in done.stderr) == ("ValueError" in ends)
