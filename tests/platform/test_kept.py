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
    kept = ProcessGroup(
        "sleeper", ["-c", "import time; time.sleep(300)"], on_exit=dead.append, count=2
    )
    kept.tick()
    try:
        first, second = pids(kept)
        os.kill(first, number)
        until(kept, lambda: dead == [first])
        until(kept, lambda: len(pids(kept)) == 2)
        assert first not in pids(kept)
        assert second in pids(kept)
    finally:
        kept.kill()


def test_what_cant_be_started_is_tried_again_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = ProcessGroup("sleeper", ["-c", "import time; time.sleep(300)"])

    def no_memory(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("config.up.processes.spawn", no_memory)
        kept.tick()
        assert not pids(kept)
    try:
        until(kept, lambda: len(pids(kept)) == 1)
        assert not kept.is_crash_looping
    finally:
        kept.kill()


def test_fault_48_what_a_signal_froze_is_ended_though_nobody_comes_round() -> None:
    """A gateway that stands still in a transaction holds what its supervisor's loop waits for."""
    kept = ProcessGroup("sleeper", ["-c", "import time; time.sleep(300)"], count=2)
    kept.tick()
    try:
        first, second = pids(kept)
        (process, _) = (each for each in kept._processes if each is not None)
        os.kill(first, signal.SIGSTOP)
        began = time.monotonic()
        process.await_death()  # without a tick
        assert 1.0 <= time.monotonic() - began < 10
        assert process.was_frozen
        os.kill(second, signal.SIGSTOP)
        os.kill(second, signal.SIGCONT)
        time.sleep(1.5)
        assert process.poll() == -signal.SIGKILL
        assert [p.poll() for p in kept._processes if p is not None] == [-signal.SIGKILL, None]
    finally:
        kept.kill()


def pids(kept: ProcessGroup) -> list[int]:
    return [process.pid for process in kept._processes if process is not None]


def until(kept: ProcessGroup, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        kept.tick()
        time.sleep(0.05)


@pytest.mark.parametrize(("held", "sent"), [(1, ["inference.sweep"]), (0, [])])
def test_other_workers_are_told_of_what_a_dead_one_held(
    held: int, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(workers, "release_leases_of_dead", lambda process: held)
    monkeypatch.setattr(workers, "send_task_best_effort", told.append)
    workers.give_back(17)
    assert told == sent
