"""A process may end while a thread of it is in the middle of a kernel."""

from __future__ import annotations

import subprocess
import sys

from tests.kernels.conftest import RUNNABLE

SCRIPT = """
import sys, threading, time
import torch
from kernels.cpu import CpuKernels
kernels = CpuKernels(sys.argv[1])
kernels.use_threads(2)
layer = kernels.PackedLinear(torch.randn(1024, 1024))
x, out = torch.randn(64, 1024), torch.empty(64, 1024)
begun = threading.Event()
def forever():
    while True:
        layer(x, out)
        begun.set()
threading.Thread(target=forever, daemon=True).start()
begun.wait()
print("ends", flush=True)
"""


def test_weights_outlive_the_threads_that_read_them():
    command = [sys.executable, "-c", SCRIPT, RUNNABLE[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
