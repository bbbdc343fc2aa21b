"""A process may end while a thread of it is in the middle of a torch operator."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import threading
import torch
from engine.devices.joined_thread import JoinedThread

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


def test_an_error_that_ends_a_process_is_its_last_word_whatever_its_threads_do() -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (
            1,
            "KeyError: 'the last words'",
        ), done.stderr
