"""Processes that `manage.py up` keeps running: killed and frozen ones are replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from config.up import stack as workers
from config.up.processes import ProcessGroup

pytestmark = pytest.mark.system


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_dies_or_stands_still_is_replaced_and_its_death_told(number: signal.Signals) -> None:
    dead: list[int] = []
    group = ProcessGroup(
        "sleeper", ["-c", "import time; time.sleep(300)"], on_exit=dead.append, count=2
    )
    group.tick()
    try:
        first, second = pids(group)
        os.kill(first, number)
        until(group, lambda: dead == [first])
        until(group, lambda: len(pids(group)) == 2)
        assert first not in pids(group)
        assert second in pids(group)
    finally:
        group.kill()


def test_what_cant_be_started_is_tried_again_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = ProcessGroup("sleeper", ["-c", "import time; time.sleep(300)"])

    def no_memory(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("config.up.processes.spawn", no_memory)
        group.tick()
        assert not pids(group)
    try:
        until(group, lambda: len(pids(group)) == 1)
        assert not group.is_crash_looping
    finally:
        group.kill()


def test_fault_48_what_a_signal_froze_is_ended_though_nobody_comes_round() -> None:
    """A gateway that stands still in a transaction holds what its supervisor's loop waits for."""
    group = ProcessGroup("sleeper", ["-c", "import time; time.sleep(300)"], count=2)
    group.tick()
    try:
        first, second = pids(group)
        (process, _) = (process for process in group._processes if process is not None)
        os.kill(first, signal.SIGSTOP)
        began = time.monotonic()
        process.await_death()  # without a tick
        assert time.monotonic() - began >= 1.0
        assert process.was_frozen
        os.kill(second, signal.SIGSTOP)
        os.kill(second, signal.SIGCONT)
        time.sleep(1.5)
        assert process.poll() == -signal.SIGKILL
        assert [p.poll() for p in group._processes if p is not None] == [-signal.SIGKILL, None]
    finally:
        group.kill()


def pids(group: ProcessGroup) -> list[int]:
    return [process.pid for process in group._processes if process is not None]


def until(group: ProcessGroup, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        group.tick()
        time.sleep(0.05)


@pytest.mark.parametrize(("num_allocated", "sent"), [(1, ["inference.sweep"]), (0, [])])
def test_other_workers_are_told_of_what_a_dead_one_held(
    num_allocated: int, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_tasks: list[str] = []
    monkeypatch.setattr(workers, "release_leases_of_dead", lambda process: num_allocated)
    monkeypatch.setattr(workers, "send_task_best_effort", sent_tasks.append)
    workers.give_back(17)
    assert sent_tasks == sent
