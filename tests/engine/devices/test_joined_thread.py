"""A process may end while a thread of it is in the middle of a torch operator."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os
import threading
import torch
from engine.devices.threads import JoinedThread

for _ in range(3):  # processes that have imported all that already
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    raise SystemExit
told, begun = threading.Event(), threading.Event()

def slice_forever():
    cache = torch.zeros(64, 64)
    while not told.is_set():
        for row in range(63):
            cache[row : row + 1].zero_()
        begun.set()

for number in range(4):
    JoinedThread(slice_forever, name=str(number), tell_end=told.set).start()
begun.wait()
raise KeyError("the last words")
"""


@pytest.mark.system
def test_an_error_that_ends_a_process_is_its_last_word_whatever_its_threads_do() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["1"] * 3, done.stderr
    *tracebacks, after = done.stderr.split("KeyError: 'the last words'\n")
    assert after == ""
    assert len(tracebacks) == 3
    assert all(text.startswith("Traceback") for text in tracebacks), done.stderr
