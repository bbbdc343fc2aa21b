"""The end of a replica's output: kept in Redis, bounded, and shown where it always was."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from catalog.models import ReplicaState
from catalog.replica_log import MAX_LINE_CHARS, MAX_LINES, LogLine, ReplicaLog, read_log
from catalog.slot import ReplicaSlot

PREFIX = "log-test"


@pytest.fixture
def client(redis_url: str) -> Any:
    client: Any = redis.Redis.from_url(redis_url)
    client.delete(f"{PREFIX}:log:r")
    yield client
    client.delete(f"{PREFIX}:log:r")
    client.close()


def run(client: Any, code: str) -> ReplicaSlot:
    """A slot whose process has ended."""
    slot = ReplicaSlot(
        "r",
        1,
        [sys.executable, "-c", code],
        drain_seconds=1.0,
        log=ReplicaLog(client, PREFIX, "r"),
    )
    slot.start({})
    assert slot.process is not None
    assert slot.process.wait(60) is not None
    slot.check()
    return slot


def lines(client: Any, until: str) -> list[LogLine]:
    """The log, once it has this text."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        log = read_log(client, PREFIX, "r")
        if any(until in line.text for line in log):
            return log
        time.sleep(0.05)
    raise AssertionError(f"{until!r} never came: {[line.text for line in log]}")


def test_a_crash_leaves_its_traceback_and_its_reason(
    client: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    slot = run(client, "import sys; sys.stderr.write('begun\\n'); raise RuntimeError('no ink')")
    texts = [line.text for line in lines(client, "no ink")]
    assert "begun" in texts
    assert any("Traceback" in text for text in texts)
    assert texts[0].startswith("-- process ")
    assert "-- the replica exited with status 1; it starts again in 0.5 s" in [
        line.text for line in lines(client, "starts again")
    ]
    assert slot.state(None) == (ReplicaState.FAILED, "the replica exited with status 1")
    assert slot.last_exit == "the replica exited with status 1"
    assert "no ink" in capfd.readouterr().err


def test_a_flood_without_line_ends_is_bounded(client: Any) -> None:
    code = "import sys; sys.stderr.write('x' * 1_000_000 + 'end'); sys.stderr.write('\\nlast\\n')"
    run(client, code)
    log_lines = lines(client, "last")
    assert max(len(line.text) for line in log_lines) <= MAX_LINE_CHARS


def test_many_lines_keep_the_newest_and_a_bar_its_last_word(client: Any) -> None:
    code = (
        "import sys\nfor n in range(5000): print(f'line {n}', file=sys.stderr)\n"
        "print('10 %\\r50 %\\r100 %', file=sys.stderr)"
    )
    run(client, code)
    log_lines = lines(client, "100 %")
    assert len(log_lines) <= MAX_LINES + 200  # Redis trims whole nodes
    assert "line 4999" in [line.text for line in log_lines]
    assert "line 0" not in [line.text for line in log_lines]
    assert "100 %" in [line.text for line in log_lines]
    following_log = read_log(client, PREFIX, "r", after=log_lines[-2].id)
    assert [line.id for line in following_log] == [log_lines[-1].id]


def test_without_redis_the_lines_wait() -> None:
    away: Any = redis.Redis(port=1, retry=Retry(NoBackoff(), 0))  # refused at once
    log = ReplicaLog(away, PREFIX, "r")
    for number in range(MAX_LINES + 10):
        log.add(str(number))
    log.flush()
    log.flush()
    assert list(log._waiting)[-1] == str(MAX_LINES + 9)
    assert len(log._waiting) == MAX_LINES


def test_the_last_words_of_a_process_are_written_once_redis_is_back(client: Any) -> None:
    class Away:
        """Refuses twice, then is the client."""

        refusals = 0

        def pipeline(self, *, transaction: bool) -> Any:
            if self.refusals < 2:
                self.refusals += 1
                raise redis.ConnectionError
            return client.pipeline(transaction=transaction)

    ours, its = os.pipe()
    os.write(its, b"last words\n")
    os.close(its)
    ReplicaLog(Away(), PREFIX, "r").forward(ours)  # type: ignore[arg-type]
    assert [line.text for line in lines(client, "last words")] == ["last words"]


def test_lines_that_come_while_redis_is_asked_push_out_the_oldest() -> None:
    class Slow:
        """Fails, and hears of a line before it does."""

        def pipeline(self, *, transaction: bool) -> Any:
            log.add("newest")
            raise redis.ConnectionError

    log = ReplicaLog(Slow(), PREFIX, "r")  # type: ignore[arg-type]
    for number in range(MAX_LINES):
        log.add(str(number))
    log.flush()
    assert (log._waiting[0], log._waiting[-1]) == ("1", "newest")
