"""Child processes that never outlive their parent and leave nothing behind.

Each child leads its own process group, so a terminal's Ctrl-C reaches only the parent, which then
stops its children in the order that it chooses; the child's own children are killed with it.
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
#: A killed process with much memory, or on a busy machine, takes a while to exit: a supervisor with
#: other replicas to look after waits no longer than this.
KILLED_WITHIN_S = 0.5

# Imported here because a child must not import or take locks between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class ManagedProcess:
    """A running child and its group.

    Attributes:
        was_frozen: whether it was killed because a signal had stopped it.
    """

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name, self.pid, self.started = name, popen.pid, time.monotonic()
        self.was_frozen = False
        self._popen = popen
        #: Serializes reaping it and signalling it from another thread.
        self._reaping = threading.Lock()

    @property
    def exit_status(self) -> bool:
        """Whether it has exited and been reaped."""
        return self._popen.returncode is not None

    def poll(self) -> int | None:
        """Exit status (negative: the signal), or None while it runs. Kills the group once dead."""
        with self._reaping:
            if self._popen.returncode is None and self._is_dead():
                # Before the child is reaped: until then no other process can get its id.
                self._signal_group(signal.SIGKILL)
                self._popen.wait()
        return self._popen.returncode

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped it; False where the system can't tell."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as stat:
                return stat.read().rpartition(b") ")[2][:1] == b"T"
        except OSError:  # not Linux, or it has exited
            return False

    def kill_if_stopped(self) -> bool:
        """Kill it and its group if a signal has stopped it; returns whether it did. Thread-safe."""
        with self._reaping:
            if self.exit_status or self.was_frozen or not self.is_stopped():
                return False
            self.was_frozen = True
            self._signal_group(signal.SIGKILL)
            return True

    def await_death(self) -> None:
        """Block until it has exited, without reaping it. Call it from a dedicated thread."""
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # ended and reaped
            return

    def terminate(self) -> None:
        """Ask the child (not its group) to exit; it stops the processes that it started."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the child (not its group), if it is running."""
        if self.poll() is None:
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill the child and its group. If it takes longer to exit, `poll` notices it."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)
            self.wait(KILLED_WITHIN_S)

    def wait(self, timeout: float) -> int | None:
        """Exit status once it has exited, or None after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return status

    def stop(self, grace: float = 10.0) -> int | None:
        """SIGTERM, then after up to `grace` seconds SIGKILL for the whole group."""
        self.terminate()
        if self.wait(grace) is None:
            self.kill()
        return self.wait(math.inf)

    def _is_dead(self) -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self.pid, flags) is not None
        except ChildProcessError:  # reaped elsewhere; Popen.wait handles that
            return True

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # the group is empty (macOS raises EPERM for a group of zombies)


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
    """Start a child in its own process group.

    Args:
        env: added to this process's environment.
        death_signal: sent to the child when the thread that started it ends (Linux), so call this
            from a thread that lives as long as the child should.
        pass_fds: file descriptors that the child inherits, under the same numbers.
    """
    popen = subprocess.Popen(
        list(command),
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        # Not a session of its own, which Linux may schedule as one (autogroup): niceness counts
        # within a session alone.
        process_group=0,
        pass_fds=tuple(pass_fds),
        preexec_fn=set_parent_death_signal(death_signal),
    )
    return ManagedProcess(name, popen)


def set_parent_death_signal(number: signal.Signals) -> Callable[[], None] | None:
    """Ask the kernel to kill the child with its parent; runs between fork and exec."""
    if _libc is None:
        return None
    parent, set_option = os.getpid(), _libc.prctl

    def prepare() -> None:
        set_option(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the option was set
            os._exit(1)

    return prepare


# A process that is stopped by SIGSTOP may hold the database's write lock, and the supervisor's
# loop waits for that lock. So a separate thread, which needs only the kernel, kills stopped
# processes.

logger = logging.getLogger(__name__)

#: A process that was stopped for this long is killed: its clients' streams continue elsewhere.
FROZEN_AFTER_S = 1.0
POLL_INTERVAL_S = 0.2


class StoppedProcessMonitor(LoopThread):
    """Watches processes until they have exited."""

    def __init__(self) -> None:
        super().__init__("quire-frozen")
        self._lock = threading.Lock()
        self._since: dict[ManagedProcess, float | None] = {}

    def add(self, process: ManagedProcess) -> None:
        """Watch this one too. Thread-safe."""
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
        """Since when it is stopped; None: it runs."""
        if not process.is_stopped():
            return None
        now = time.monotonic()
        if since is not None and now - since >= FROZEN_AFTER_S and process.kill_if_stopped():
            logger.error("%s was frozen by a signal and killed", process.name)
        return now if since is None else since


_watch = StoppedProcessMonitor()


def kill_when_stopped(process: ManagedProcess) -> None:
    """Kill the process and its group if a signal stops it; `was_frozen` is set then."""
    _watch.add(process)
