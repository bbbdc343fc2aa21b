"""Media are prepared at a low priority, also where Linux schedules each session as one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.multimodal.worker import NICENESS
from engine.system.worker_process import WorkerProcess
from tests.waiting import wait_until


def test_text_goes_before_media() -> None:
    worker = WorkerProcess("engine.multimodal.worker", "media worker")
    try:
        pid = worker._process.pid
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == NICENESS)
        autogroup = Path(f"/proc/{pid}/autogroup")
        if not autogroup.exists():
            pytest.skip("the kernel doesn't schedule sessions as one")
        wait_until(lambda: autogroup.read_text().split()[-1] == str(NICENESS))
    finally:
        worker.close()
