"""Short turns of the processor, as the kernel tells of them afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from engine.system import host as time_slice
from engine.system.host import SHORT_NS, request_short_time_slice
from tests.short_turns import keeps_slices, turn_ns


@keeps_slices
def test_the_thread_that_asks_gets_them_and_the_others_do_not() -> None:
    seen: list[object] = []

    def ask() -> None:
        seen.append(request_short_time_slice())
        seen.append(turn_ns())
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))

    initial, nice = turn_ns(), os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen == [True, SHORT_NS, nice]
    assert turn_ns() == initial != SHORT_NS


@pytest.mark.system
@keeps_slices
def test_another_process_of_the_same_user_gets_them() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert request_short_time_slice(process.pid)
        assert turn_ns(process.pid) == SHORT_NS


@pytest.mark.system
def test_a_thread_that_its_operator_runs_in_another_way_stays_as_it_is() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.sched_setscheduler(process.pid, os.SCHED_BATCH, os.sched_param(0))
        assert not request_short_time_slice(process.pid)
        assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH


def test_where_there_is_no_such_thread_or_machine_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not request_short_time_slice(2**22 + 1)
    monkeypatch.setattr(time_slice.platform, "machine", lambda: "riscv64")
    assert not request_short_time_slice()
