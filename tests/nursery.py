"""Where copies of a process with its imports begin as the programs that tests start.

Each worker of a run has one beside it: a copy of the same template that never ran a test. It forks
for whoever asks, and what it forked becomes the asker's own child: see `tests/copies.py`.

    python -m tests.nursery FILE     one by itself on a socket that it's given; imports `IMPORTS`
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any, NoReturn

#: Tells a worker which of its open files is the way to its nursery.
NAME = "QUIRE_TEST_NURSERY"
#: What one by itself imports: a variable, for a command line may be looked at.
IMPORTS = "QUIRE_TEST_IMPORTS"
PR_SET_PDEATHSIG = 1
#: Above all that a program is given by number.
_HIGH = 300


def offer() -> dict[str, Any] | None:
    """Begin a nursery for this process. In a copy: which program to be, see `become`."""
    ours, its = socket.socketpair()
    if os.fork():
        its.close()
        os.environ[NAME] = str(ours.detach())
        return None
    link = its.detach()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.dup2(link, 3)
    os.closerange(4, _HIGH)
    return _serve(socket.socket(fileno=3))


def _serve(link: socket.socket) -> dict[str, Any]:
    """Fork for each request, until the other end closes. Returns in the copies alone."""
    while True:
        head, fds, _, _ = socket.recv_fds(link, 8, 64)
        if not head:
            os._exit(0)
        body = link.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        between = os.fork()
        if between == 0:
            known = os.getpid()
            if os.fork():
                os._exit(0)  # the copy becomes a child of the nearest process that takes orphans
            while os.getppid() == known:
                time.sleep(0.0005)
            link.sendall(os.getpid().to_bytes(8, "big"))
            link.close()
            return json.loads(body) | {"fds": fds}
        os.waitpid(between, 0)
        for number in fds:
            os.close(number)


def become(request: dict[str, Any]) -> NoReturn:
    """Be that program to its end, at which modules are left as they are: to take those apart that
    only the template needed costs more than most programs.
    """
    status, interrupted = 0, False
    try:
        _run(request)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and error.code != status:
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 255)


def _run(request: dict[str, Any]) -> None:
    """With its arguments, environment, folder and open files."""
    if request.get("session"):
        os.setsid()
    if request.get("death"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, request["death"], 0, 0, 0)
    _open(request["fds"], request["numbers"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    words: list[str] = request["words"]
    _entitle([request["title"]] if "title" in request else words)
    paths = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    if "OMP_NUM_THREADS" in request["env"]:  # read when the library was loaded
        sys.modules["torch"].set_num_threads(int(request["env"]["OMP_NUM_THREADS"]))
    if words[0] == "-m":
        sys.path[:0] = [os.getcwd(), *paths]
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path[:0] = ["", *paths]
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(words[1], main.__dict__)
    else:
        sys.path[:0] = [str(Path(words[0]).resolve().parent), *paths]
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _entitle(words: list[str]) -> None:
    """Have these for a command line, as far as there's room for them where the template's is."""
    stat = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    begin, end = int(stat[45]), int(stat[46])
    line = b"\0".join(map(os.fsencode, words)).ljust(end - begin, b"\0")
    ctypes.memmove(begin, line[: end - begin - 1] + b"\0", end - begin)


def _open(given: list[int], numbers: list[int]) -> None:
    """Have these open files under these numbers, no others, and the standard streams on them."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, _HIGH) for each in given]
    os.closerange(0, _HIGH)
    for each, number in zip(high, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


if __name__ == "__main__":
    for module in os.environ[IMPORTS].split():
        importlib.import_module(module)
    gc.freeze()
    become(_serve(socket.socket(fileno=int(sys.argv[1]))))
