"""A server's end: its threads and exit handlers have their turn, the interpreter's clearing away
has not.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from config.management.commands import worker
from config.up.stack import WORKER_GRACE_S
from tests.console.live import ROOT

pytestmark = pytest.mark.system

PROCESS = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, {platform!r})
from config.shutdown import run_and_exit_fast

class Cleared:
    def __del__(self): print("cleared", flush=True)

kept = Cleared()
kept.itself = kept

def work():
    atexit.register(print, "handler")
    ThreadPoolExecutor().submit(lambda: (time.sleep(0.2), print("thread")))
    sys.stdout.write("worked\\n")
    {ends}

run_and_exit_fast(work)
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


STUCK = """
import sys, threading, time
sys.path.insert(0, {platform!r})
from config.shutdown import exit_after_timeout, run_and_exit_fast

def waits_for_a_lock():
    threading.Event().wait()

def work():
    threading.Thread(target=waits_for_a_lock, name="database").start()
    exit_after_timeout(0.3)

run_and_exit_fast(work)
"""


def test_what_a_thread_waits_for_keeps_no_process_for_ever_and_is_told() -> None:
    script = STUCK.format(platform=str(ROOT / "platform"))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "not ended after 0.3 s" in done.stderr
    assert "database\n" in done.stderr
    assert "waits_for_a_lock" in done.stderr


def test_a_worker_that_is_told_to_end_does_so_before_who_told_it_loses_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts: list[float] = []
    monkeypatch.setattr(worker, "exit_after_timeout", timeouts.append)
    monkeypatch.setattr(
        worker.app, "worker_main", lambda _: worker.worker_shutting_down.send(sender="test")
    )
    try:
        worker.run_threads(["jobs"], beats=False)
    finally:
        worker.worker_shutting_down.disconnect(worker._end)
    assert timeouts == [worker.ENDS_WITHIN_S]
    assert worker.ENDS_WITHIN_S < WORKER_GRACE_S
