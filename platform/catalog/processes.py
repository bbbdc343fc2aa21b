"""Child processes that can't outlive their parent and leave nothing behind.

A child leads a process group of its own, so a terminal's Ctrl-C reaches the parent alone, which
then stops its children in the order it wants; and whatever a child forked goes with it.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from common.loops import LoopThread

PR_SET_PDEATHSIG = 1
POLL_S = 0.02
#: A killed process with much memory, or on a busy machine, is there for a while: who looks after
#: others as well waits no longer for it.
KILLED_WITHIN_S = 0.5

# Loaded here because a child between fork and exec must not import or take locks.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class ManagedProcess:
    """A running child and its group.

    Attributes:
        was_frozen: whether it was killed because a signal had frozen it.
    """

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name, self.pid, self.started = name, popen.pid, time.monotonic()
        self.was_frozen = False
        self._popen = popen
        #: Held by who reaps it, and by who signals it from another thread.
        self._reaping = threading.Lock()

    @property
    def exit_status(self) -> bool:
        """Whether it has ended and its end was noticed."""
        return self._popen.returncode is not None

    def poll(self) -> int | None:
        """Exit status (negative: the signal), or None while it runs. Sweeps the group once dead."""
        with self._reaping:
            if self._popen.returncode is None and self._is_dead():
                # Before the child is reaped: its id can't belong to anybody else yet.
                self._signal_group(signal.SIGKILL)
                self._popen.wait()
        return self._popen.returncode

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has frozen it; False where the system doesn't tell."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as stat:
                return stat.read().rpartition(b") ")[2][:1] == b"T"
        except OSError:  # no Linux, or it has ended
            return False

    def kill_if_stopped(self) -> bool:
        """Kill it and its group if a signal has frozen it; whether it did. Any thread."""
        with self._reaping:
            if self.exit_status or self.was_frozen or not self.is_stopped():
                return False
            self.was_frozen = True
            self._signal_group(signal.SIGKILL)
            return True

    def await_death(self) -> None:
        """Return when it has ended, without reaping it. For a thread of its own."""
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # ended and reaped
            return

    def terminate(self) -> None:
        """Ask the child (not its group) to end; it looks after what it started."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the child (not its group), if it's running."""
        if self.poll() is None:
            self._popen.send_signal(number)

    def kill(self) -> None:
        """End the child and all of its group. One that takes longer to go is found by `poll`."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)
            self.wait(KILLED_WITHIN_S)

    def wait(self, timeout: float) -> int | None:
        """Exit status once it ended, or None when `timeout` seconds passed first."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return status

    def stop(self, grace: float = 10.0) -> int | None:
        """SIGTERM, up to `grace` seconds of patience, then SIGKILL for the whole group."""
        self.terminate()
        if self.wait(grace) is None:
            self.kill()
        return self.wait(math.inf)

    def _is_dead(self) -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self.pid, flags) is not None
        except ChildProcessError:  # reaped by someone else; Popen.wait copes with that
            return True

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # the group is empty (macOS says EPERM for a group of zombies)


def spawn(
    command: Sequence[str],
    *,
    name: str,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
    pass_fds: Sequence[int] = (),
) -> ManagedProcess:
    """Start a child in a group of its own.

    Args:
        env: added to this process's environment.
        death_signal: what the child gets when the thread that started it ends (Linux), so call
            this from a thread that lives as long as the child shall.
        pass_fds: open files that the child keeps, under the same numbers.
    """
    popen = subprocess.Popen(
        list(command),
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        preexec_fn=set_parent_death_signal(death_signal),
    )
    return ManagedProcess(name, popen)


def set_parent_death_signal(number: signal.Signals) -> Callable[[], None] | None:
    """Ask the kernel to end the child with its parent; runs between fork and exec."""
    if _libc is None:
        return None
    parent, set_option = os.getpid(), _libc.prctl

    def prepare() -> None:
        set_option(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the option was set
            os._exit(1)

    return prepare


# A process that is stopped by SIGSTOP may hold the database's write lock, and the supervisor's
# loop waits for that lock. So a separate thread, which only asks the kernel, ends stopped
# processes.

logger = logging.getLogger(__name__)

#: Frozen for so long, a process is killed: its clients' streams go on elsewhere.
FROZEN_AFTER_S = 1.0
POLL_INTERVAL_S = 0.2


class StoppedProcessMonitor(LoopThread):
    """Looks at processes until they have ended."""

    def __init__(self) -> None:
        super().__init__("quire-frozen")
        self._lock = threading.Lock()
        self._since: dict[ManagedProcess, float | None] = {}

    def add(self, process: ManagedProcess) -> None:
        """Look at this one too. Any thread."""
        with self._lock:
            self._since[process] = None
            if self.ident is None:
                self.start()

    def loop(self) -> None:
        while not self.stopping.wait(POLL_INTERVAL_S):
            with self._lock:
                self._since = {
                    p: stopped_at for p, stopped_at in self._since.items() if not p.exit_status
                }
                looked_at = list(self._since)
            for process in looked_at:
                since = self._stopped_since(process, self._since.get(process))
                with self._lock:
                    self._since[process] = since

    @staticmethod
    def _stopped_since(process: ManagedProcess, since: float | None) -> float | None:
        """Since when it stands still; None: it runs."""
        if not process.is_stopped():
            return None
        now = time.monotonic()
        if since is not None and now - since >= FROZEN_AFTER_S and process.kill_if_stopped():
            logger.error("%s was frozen by a signal and killed", process.name)
        return now if since is None else since


_watch = StoppedProcessMonitor()


def kill_when_stopped(process: ManagedProcess) -> None:
    """Kill it, and its group, once a signal has frozen it; its `was_frozen` says so then."""
    _watch.add(process)
