"""`WorkerProcess`: a program that serves requests over its pipes and is killed at a deadline.

It is for work on untrusted input: its time is limited, and its memory is separate from this
process.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, BinaryIO

log = logging.getLogger(__name__)

#: Four bytes of length, little-endian, then the payload.
_HEAD = struct.Struct("<I")
MAX_FRAME = 256 * 2**20
_ROOT = Path(__file__).resolve().parents[2]


def write_frame(stream: BinaryIO, payload: bytes) -> None:
    """Write one frame. Raises OSError if the other side has exited."""
    view = memoryview(_HEAD.pack(len(payload)) + payload)
    while view:
        # An unbuffered pipe may accept only a part.
        view = view[stream.write(view) :]
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the next frame; None at the end. Raises ValueError for a frame larger than MAX_FRAME."""
    head = _read_exactly(stream, _HEAD.size)
    if head is None:
        return None
    (length,) = _HEAD.unpack(head)
    if length > MAX_FRAME:
        raise ValueError(f"A frame of {length} bytes is over the limit.")
    return _read_exactly(stream, length)


def _read_exactly(stream: BinaryIO, count: int) -> bytes | None:
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def open_worker_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return this program's streams of requests and answers. What it prints goes to stderr, and it
    dies with the process that started it (Linux's PR_SET_PDEATHSIG).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return sys.stdin.buffer, answers


def limit_memory(more_bytes: int) -> None:
    """Limit the address space to its current size plus `more_bytes`."""
    limit = _statm(0) + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return _statm(1)


def _statm(field: int) -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[field]) * resource.getpagesize()


class WorkerProcess:
    """A running worker. Not thread-safe, except `kill`, which ends a wait in another thread.

    Attributes:
        timed_out: whether it was killed because of a deadline.
        processor_s: processors' time of the latest request, also of one that ended it.
    """

    def __init__(self, command: str | tuple[str, ...], name: str, *, nice: int = 0) -> None:
        """Start it.

        Args:
            command: a module for `python -m`, or a whole command line.
            name: for the log.
            nice: its niceness.

        Raises:
            OSError: it can't be started.
        """
        if isinstance(command, str):
            command = (sys.executable, "-m", command)
        if nice:
            command = ("nice", "-n", str(nice), *command)
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._name = name
        self.timed_out, self.processor_s = False, 0.0
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads, "PYTHONPATH": path},
            # A terminal's signals don't reach the worker. A session of its own would do that, too,
            # but Linux may schedule a session as one (autogroup): niceness wouldn't count.
            process_group=0,
        )

    @property
    def alive(self) -> bool:
        """Whether it can take requests."""
        return self._process.poll() is None

    def request(
        self, frame: bytes, timeout_s: float, max_processor_s: float | None = None
    ) -> bytes | None:
        """Return its answer; None if it died or was killed at the deadline.

        Args:
            timeout_s: by the clock.
            max_processor_s: of its processors' time, rounded up to whole seconds: how long a file
                takes then doesn't depend on what else the machine does.
        """
        timer = threading.Timer(timeout_s, self._kill_late)
        timer.daemon = True
        timer.start()
        used_s = self._used_s()
        try:
            if max_processor_s is not None and self.alive:  # else its id may be another's
                _limit_processor_time(self._process.pid, used_s + max_processor_s)
            write_frame(_pipe(self._process.stdin), frame)
            answer = read_frame(_pipe(self._process.stdout))
        except (OSError, ValueError) as error:  # ValueError: the answer is too large to be read
            log.info("A %s is gone: %s", self._name, error)
            answer = None
        finally:
            timer.cancel()
        self.processor_s = max(0.0, self._used_s() - used_s)
        if answer is None:
            self.close()
            if self._process.returncode == -signal.SIGXCPU:
                log.warning("A %s was killed at its limit of processor time.", self._name)
                self.timed_out = True
        return answer

    def _used_s(self) -> float:
        """Seconds of its processors' time; 0 once it is reaped."""
        if self._process.returncode is not None:
            return 0.0
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _kill_late(self) -> None:
        log.warning("A %s was killed at its time limit.", self._name)
        self.timed_out = True
        self.kill()

    def kill(self) -> None:
        """Kill it; `close` reaps it in the requesting thread."""
        self._process.kill()

    def close(self) -> None:
        """Kill and reap it, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError as error:  # unsent bytes for a dead worker
                    log.debug("Closing the pipe of a %s: %s", self._name, error)


def _limit_processor_time(pid: int, seconds: float) -> None:
    """Have Linux end a process (SIGXCPU) once it has used so much processor time.

    Raises OSError if it is gone.
    """
    limit = math.ceil(seconds)
    _, hard = resource.prlimit(pid, resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.prlimit(pid, resource.RLIMIT_CPU, (limit, hard))


def _pipe(pipe: IO[bytes] | None) -> Any:
    if pipe is None:
        raise OSError("The worker has no pipes.")
    return pipe
