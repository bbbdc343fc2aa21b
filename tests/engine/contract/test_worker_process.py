"""Workers on untrusted input: what ends them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from engine.system.worker_process import WorkerProcess

pytestmark = pytest.mark.system

#: Answers each request with itself, after what it says.
_PROGRAM = """
import sys, time
from engine.system.worker_process import open_worker_pipes, read_frame, write_frame

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

requests, answers = open_worker_pipes()
while (frame := read_frame(requests)) is not None:
    exec(frame)
    write_frame(answers, frame)
"""


@pytest.fixture
def start() -> Iterator[Callable[[], WorkerProcess]]:
    with ExitStack() as stack:

        def start() -> WorkerProcess:
            worker = WorkerProcess((sys.executable, "-c", _PROGRAM), "test worker")
            stack.callback(worker.close)
            assert worker.request(b"", 120) == b""  # its start takes processor time, too
            return worker

        yield start


def test_time_in_which_others_have_the_processors_does_not_count(
    start: Callable[[], WorkerProcess],
) -> None:
    worker = start()
    assert worker.request(b"time.sleep(2.5)", 120, 0.5) == b"time.sleep(2.5)"
    assert worker.processor_s < 1


def test_each_request_has_the_whole_processor_time(start: Callable[[], WorkerProcess]) -> None:
    worker = start()
    for _ in range(3):
        assert worker.request(b"burn(0.8)", 120, 1) == b"burn(0.8)"
        assert worker.processor_s == pytest.approx(0.8, abs=0.2)


def test_a_worker_ends_at_its_limit_of_processor_time(
    start: Callable[[], WorkerProcess], caplog: pytest.LogCaptureFixture
) -> None:
    worker = start()
    with caplog.at_level(logging.WARNING):
        assert worker.request(b"burn(1e9)", 120, 0.5) is None
    assert worker.timed_out
    assert not worker.alive
    assert worker.processor_s >= 0.4
    assert "limit of processor time" in caplog.text


def test_a_worker_that_only_waits_ends_by_the_clock(start: Callable[[], WorkerProcess]) -> None:
    worker = start()
    assert worker.request(b"time.sleep(120)", 2, 0.5) is None
    assert worker.timed_out


def test_a_worker_that_has_ended_is_not_one_that_took_too_long(
    start: Callable[[], WorkerProcess],
) -> None:
    worker = start()
    assert worker.request(b"sys.exit()", 120, 0.5) is None
    assert worker.request(b"x = 1", 120, 0.5) is None
    assert not worker.timed_out
