"""Children can't outlive their parent and leave nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from catalog.processes import spawn
from tests.waiting import wait_until

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
SLEEP = "import time; time.sleep(600)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def gone(pid: int) -> bool:
    """Whether a process has ended (one that nobody reaped counts as ended)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_end_is_noticed_with_its_status() -> None:
    child = spawn(python("raise SystemExit(3)"), name="x")
    assert child.wait(60) == 3
    assert child.poll() == 3


def test_stop_is_gentle_first() -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    child = spawn(python(code), name="x", stdout=subprocess.PIPE)
    assert child._popen.stdout is not None
    child._popen.stdout.readline()
    assert child.stop(grace=20) == 7
    child._popen.stdout.close()


def test_stop_kills_what_does_not_listen_and_all_of_its_children() -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    child = spawn(python(code), name="x", stdout=subprocess.PIPE)
    assert child._popen.stdout is not None
    grandchild = int(child._popen.stdout.readline())
    assert child.stop(grace=0.1) == -signal.SIGKILL
    wait_until(lambda: gone(grandchild), "the grandchild's end")
    child._popen.stdout.close()


def test_what_a_dead_child_left_behind_is_swept() -> None:
    code = (
        "import subprocess, sys\n"
        f"print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True)"
    )
    child = spawn(python(code), name="x", stdout=subprocess.PIPE)
    assert child._popen.stdout is not None
    grandchild = int(child._popen.stdout.readline())
    assert child.wait(60) == 0
    wait_until(lambda: gone(grandchild), "the grandchild's end")
    child._popen.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_killed_parent_takes_its_children_with_it() -> None:
    code = (
        "import sys, time; sys.path[:0] = ['platform']\n"
        "from catalog.processes import spawn\n"
        f"print(spawn([sys.executable, '-c', {SLEEP!r}], name='x').pid, flush=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: gone(child), "the child's end")


def test_a_terminals_interrupt_does_not_reach_children() -> None:
    child = spawn(python(SLEEP), name="x")
    try:
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    finally:
        child.kill()
    assert child.poll() == -signal.SIGKILL
