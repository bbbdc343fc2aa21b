"""The process that collected the tests, forks workers, gives them groups and gathers reports."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.order import group_of
from tests.sharing.wire import Lines, Message, encode, report_of, warning_of
from tests.sharing.worker import work

#: What is torn down when a run is interrupted may take as long.
GRACE_S = 60.0


@dataclass(slots=True)
class Forked:
    """A worker as the foreman sees it."""

    pid: int
    end: socket.socket
    lines: Lines
    #: Numbers of tests that it was given and has not ended, in their order.
    given: deque[int] = field(default_factory=deque)
    #: The test that runs.
    running: int | None = None
    #: All it was to do is done.
    left: bool = False


class Foreman:
    """Shares the tests of a session out; `run` returns when all have run, or enough failed."""

    def __init__(self, session: pytest.Session, processes: int) -> None:
        self._session, self._processes = session, processes
        numbered = enumerate(session.items)
        by_group = groupby(numbered, key=lambda each: group_of(each[1].nodeid.split("::", 1)[0]))
        self._groups = deque([number for number, _ in group] for _, group in by_group)
        self._workers: dict[int, Forked] = {}
        self._selector = selectors.DefaultSelector()
        self._forked = 0
        self._interrupted = False

    def run(self) -> None:
        """Until no worker is left."""
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate())
            raise RuntimeError(f"Threads don't outlive a fork, and collecting began some: {names}")
        reporter: Any = self._session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # tests of many files end in turn
        try:
            for _ in range(min(self._processes, len(self._groups))):
                self._fork()
            while self._workers:
                for key, _ in self._selector.select():
                    self._hear(key.data)
        finally:
            self._end_all()

    def _fork(self) -> None:
        here, there = socket.socketpair()
        config: Any = self._session.config
        base: Path = config._tmp_path_factory.mktemp(f"worker{self._forked}", numbered=False)
        self._forked += 1
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            for other in self._workers.values():
                other.end.close()
            here.close()
            work(self._session, there, base)
        there.close()
        worker = Forked(pid, here, Lines(here))
        self._workers[pid] = worker
        self._selector.register(here, selectors.EVENT_READ, worker)

    def _hear(self, worker: Forked) -> None:
        told = worker.lines.read()
        if told is None:
            self._bury(worker)
            return
        for message in told:
            self._take(worker, message)

    def _take(self, worker: Forked, message: Message) -> None:
        hook, items = self._session.config.hook, self._session.items
        match message:
            case {"ask": _}:
                group = self._groups.popleft() if self._groups and not self._stops() else []
                worker.given.extend(group)
                with contextlib.suppress(BrokenPipeError):  # it died; its end says so next
                    worker.end.sendall(encode({"run": group}))
            case {"began": number}:
                worker.running = number
            case {"report": data}:
                hook.pytest_runtest_logreport(report=report_of(self._session.config, data))
            case {"ended": number}:
                worker.given.remove(number)
                worker.running = None
                item = items[number]
                hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            case {"warning": data, "when": when, "nodeid": nodeid, "location": location}:
                hook.pytest_warning_recorded.call_historic(
                    kwargs={
                        "warning_message": warning_of(data),
                        "when": when,
                        "nodeid": nodeid,
                        "location": tuple(location) if location else None,
                    }
                )
            case {"stop": reason}:
                self._session.shouldstop = self._session.shouldstop or reason
            case {"bye": _}:
                worker.left = True
            case {"broken": text}:
                raise RuntimeError(f"A worker broke:\n{text}")
        if self._stops():
            self._interrupt()

    def _stops(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _bury(self, worker: Forked) -> None:
        """It's gone. If in the middle of a test, that one failed, and another runs the rest."""
        self._selector.unregister(worker.end)
        worker.end.close()
        del self._workers[worker.pid]
        _, status = os.waitpid(worker.pid, 0)
        if worker.left or self._stops():
            return
        if worker.running is None:
            raise RuntimeError(f"A worker left between two tests: {_words(status)}.")
        worker.given.remove(worker.running)
        self._report_death(self._session.items[worker.running], _words(status))
        if worker.given:
            self._groups.appendleft(list(worker.given))
        if self._groups and not self._stops():
            self._fork()

    def _report_death(self, item: pytest.Item, words: str) -> None:
        hook = self._session.config.hook
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"The process that ran it ended: {words}.",
            when="call",
        )
        hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _interrupt(self) -> None:
        if self._interrupted:
            return
        self._interrupted = True
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)

    def _end_all(self) -> None:
        """Whoever still runs tears down what stands, and is killed if that takes too long."""
        self._interrupt()
        deadline = time.monotonic() + GRACE_S
        for worker in self._workers.values():
            worker.end.close()
            while os.waitpid(worker.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.05)


def _words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
