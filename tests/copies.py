"""Programs that tests start with Python are copies of a process that has imported what is long.

What they import of other people's takes half of their start and more: torch a second and a half of
a processor, Django and what stands around it half a second. A copy is a child of the process that
asked for it like any other: it's waited for, signalled and read from by `subprocess` itself.
Products start their own processes as ever. Who names the `executable` gets a Python of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tests.nursery import NAME

#: What may be a copy: `python` with these,
PROGRAMS = ("manage.py",)
MODULES = (
    *("config.serve", "daphne", "benchmarks.compare", "engine.lora.check"),
    *("engine.serving", "pytest", "uvicorn"),
    *("tests.fakes.fake_replica", "tests.console.seed", "tests.console.showcase"),
)
#: and what stands behind `-c`, where somebody has said so.
SCRIPTS: set[str] = set()
#: Variables that libraries read when they are loaded. Whoever has other ones is no copy.
READ_EARLY = (
    *("CUDA_", "HF_", "KMP_", "LANG", "LC_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON"),
    *("TORCH", "TRANSFORMERS_", "TRITON_"),
)
#: But for these, which a copy sees to.
READ_AGAIN = {"PYTHONPATH", "OMP_NUM_THREADS"}
PR_SET_CHILD_SUBREAPER = 36

_plain = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class Nursery:
    """The way to this process's own."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lock = link, threading.Lock()
        self._early = early(os.environ)

    def knows(self, args: Any, env: Mapping[str, str]) -> bool:
        """Whether such a program may be a copy."""
        if isinstance(args, str | bytes) or args[0] != sys.executable:
            return False
        return is_known([os.fspath(word) for word in args[1:]]) and early(env) == self._early

    def bear(
        self, popen: Any, args: Sequence[Any], pipes: Sequence[int], pass_fds: Sequence[int],
        *, cwd: Any, env: Mapping[str, str], **more: Any,
    ) -> None:  # fmt: skip
        """What `subprocess.Popen._execute_child` does: `popen` has a child then.

        `more`: `session`, to lead one; `death`, a signal at this process's; `title`, in the place
        of its command line.
        """
        request = {
            "words": [os.fspath(word) for word in args[1:]],
            "env": dict(env),
            "cwd": os.path.abspath(cwd or "."),
            "numbers": [0, 1, 2, *pass_fds],
            **more,
        }
        streams = [pipes[0], pipes[3], pipes[5]]
        fds = [number if it == -1 else it for number, it in enumerate(streams)] + [*pass_fds]
        try:
            popen.pid = self._start(request, fds)
            popen._child_created = True
        finally:
            popen._close_pipe_fds(*pipes)

    def _start(self, request: dict[str, Any], fds: list[int]) -> int:
        """The id of a new child of this process."""
        data = json.dumps(request).encode()
        with self._lock:
            _take_orphans(True)
            try:
                socket.send_fds(self._link, [len(data).to_bytes(8, "big")], fds)
                self._link.sendall(data)
                pid = int.from_bytes(self._link.recv(8, socket.MSG_WAITALL), "big")
            finally:
                _take_orphans(False)
        if not pid:
            raise ChildProcessError("The nursery has ended.")
        return pid


def early(env: Mapping[str, str]) -> dict[str, str]:
    """What libraries read of it when they are loaded."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(READ_EARLY) and name not in READ_AGAIN
    }


def is_known(words: Sequence[str]) -> bool:
    """Whether these, behind `python`, are a program that may be a copy."""
    first, second = [*words, "", ""][:2]
    if first in ("-m", "-c"):
        return second in (MODULES if first == "-m" else SCRIPTS)
    return os.path.basename(first) in PROGRAMS


def _take_orphans(yes: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def use() -> None:
    """From now on, if a nursery stands beside this process."""
    number = os.environ.pop(NAME, None)
    if number is None:
        return
    nursery = Nursery(socket.socket(fileno=int(number)))

    def execute_child(
        self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any,
        cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: Any, *rest: Any,
    ) -> None:  # fmt: skip
        pipes, (_, gid, gids, uid, umask, session, group) = rest[:6], rest[6:]
        seen = os.environ if env is None else env
        odd = (executable, preexec_fn, not close_fds, shell, umask != -1, group != -1)
        if any(odd) or (gid, gids, uid) != (None,) * 3 or not nursery.knows(args, seen):
            _plain(
                self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                creationflags, shell, *rest,
            )  # fmt: skip
            return
        nursery.bear(self, args, pipes, pass_fds, cwd=cwd, env=seen, session=session)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
