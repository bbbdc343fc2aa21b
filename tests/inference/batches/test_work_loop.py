"""A worker's own loop: places that become free are taken at once, in the order of turns."""

from __future__ import annotations

import threading
import time

import pytest

from inference.work import JobRunner

#: What is here of requests is written when a loop ends, whichever test left it.
pytestmark = pytest.mark.usefixtures("transactional_db")


def test_a_loop_that_is_stopped_leaves_no_thread_behind() -> None:
    initial = set(threading.enumerate())
    loop = JobRunner({}, {})
    loop.stop()

    def remaining_folders() -> set[str]:
        return {thread.name for thread in set(threading.enumerate()) - initial}

    deadline = time.monotonic() + 60
    while remaining_folders() and time.monotonic() < deadline:
        time.sleep(0.05)  # asgiref's thread of a call ends a moment after the call
    assert remaining_folders() == set()


def test_a_free_place_is_taken_without_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.work.POLL_INTERVAL_S", 0.01)
    waiting, done = [f"w{n}" for n in range(5)], threading.Event()
    ran: list[str] = []

    async def run(public_id: str, owner: str) -> None:
        ran.append(public_id)
        if public_id in waiting:
            waiting.remove(public_id)
        if not waiting:
            done.set()

    loop = JobRunner({"batch": run}, {"batch": 1}, {"batch": lambda: list(waiting)})
    try:
        loop.start("batch", "first")
        assert done.wait(60)
        time.sleep(0.05)
    finally:
        loop.stop()
    assert ran == ["first", "w0", "w1", "w2", "w3", "w4"]
