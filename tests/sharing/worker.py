"""A forked process that runs what it's given and tells what came of it."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.sharing.wire import Lines, Message, encode, warning_data


class Worker:
    """As a plugin it sends reports and warnings; `run` runs groups of tests until none is left."""

    def __init__(self, session: pytest.Session, end: socket.socket) -> None:
        self._session, self._end, self._lines = session, end, Lines(end)
        self._runs = False

    def run(self) -> None:
        """All that there is to do."""
        items, self._runs = self._session.items, True
        for index, following in _with_next(self._ask):
            nextitem = None if following is None else items[following]
            self._send({"began": index})
            self._session.config.hook.pytest_runtest_protocol(item=items[index], nextitem=nextitem)
            self._send({"ended": index})
            if reason := self._session.shouldfail or self._session.shouldstop:
                self._send({"stop": str(reason)})
                return

    def _ask(self) -> list[int]:
        self._send({"ask": True})
        while True:
            told = self._lines.read()
            if told is None:
                raise KeyboardInterrupt  # who shared them out is dead
            for message in told:
                return message["run"]

    def _send(self, message: Message) -> None:
        self._end.sendall(encode(message))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Each of a test's three."""
        config = self._session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._send({"report": data})

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """Warnings are counted where the summary is written; there those of collecting are known,
        of which a plugin hears when it's registered.
        """
        if not self._runs:
            return
        about = {"when": when, "nodeid": nodeid, "location": location}
        self._send({"warning": warning_data(warning_message), **about})


def _with_next(ask: Callable[[], list[int]]) -> Iterator[tuple[int, int | None]]:
    """Each test and the one behind it, which says what may be torn down between them. So a group
    is asked for when the last test of the one before is about to begin, and not earlier.
    """
    group = ask()
    while group:
        yield from itertools.pairwise(group)
        following = ask()
        yield group[-1], following[0] if following else None
        group = following


def work(session: pytest.Session, end: socket.socket, base: Any) -> None:
    """What the forked process does; it never returns.

    base: the folder that its tests' folders are made in.
    """
    status = 1
    # What the forking process is to do at its exit is its own. `multiprocessing` does the same.
    atexit._clear()
    try:
        _become_a_worker(session.config, base)
        worker = Worker(session, end)
        session.config.pluginmanager.register(worker)
        try:
            worker.run()
        finally:
            # Of whoever was interrupted something stands yet: servers, for one.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            session._setupstate.teardown_exact(None)
        end.sendall(encode({"bye": True}))
        status = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        end.sendall(encode({"broken": traceback.format_exc()}))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(status)


def _become_a_worker(config: pytest.Config, base: Any) -> None:
    """Nothing is written where the others write: neither output, nor files, nor what they show."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:
        terminal._tw._file = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
