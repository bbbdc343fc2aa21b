"""Workers of a run are copies of one process that has imported what takes long to import.

xdist would start each as a Python of its own, and torch, transformers and PEFT take five seconds of
a processor each time. What it starts in Python's place hands its standard streams over to the
template, which forks, and waits until the copy has ended.

    python -P tests/template.py serve SOCKET MODULE ...   until its standard input ends
    python -P tests/template.py copy SOCKET ...           the rest is what Python would be given
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Other people's alone: of ours a test may want to see the import.
MODULES = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "peft",
    # What stands around Django, and needs no settings.
    *("celery.app.base", "channels.generic.websocket", "django.contrib.admin", "fido2.webauthn"),
    *("django.core.management.base", "django.db.backends.sqlite3.base", "jinja2.sandbox"),
    *("prometheus_client", "pydantic", "redis.asyncio", "requests", "uvicorn.config"),
)
START_TIMEOUT_S = 120.0


def pytest_xdist_setupnodes(config: Any, specs: list[Any]) -> None:
    """Have this run's workers copied."""
    folder = Path(tempfile.mkdtemp(prefix="q-", dir="/tmp"))
    program = [sys.executable, "-P", __file__]  # or modules of ours would be found for others
    # It ends with this process, at which the other end of its standard input closes.
    server = subprocess.Popen(
        [*program, "serve", folder / "socket", *MODULES], stdin=subprocess.PIPE
    )
    config.add_cleanup(lambda: _end(server, folder))
    for spec in specs:
        spec.python = " ".join([*program, "copy", str(folder / "socket")])


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.communicate()
    (folder / "socket").unlink()
    folder.rmdir()


def serve(path: str, *modules: str) -> None:
    """Import them, then fork for whoever asks. Returns at the end, and in a copy at its end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            be_python(connection)
            return
        connection.close()
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # what has ended is counted as this process's children
            pass


def be_python(connection: socket.socket) -> None:
    """Do what `python -c` would: what xdist sends is a program in one line."""
    streams = socket.recv_fds(connection, 1, 3)[1]
    nursery = _nursery()
    if (request := nursery.offer()) is not None:
        nursery.become(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.argv = os.fdopen(0, closefd=False), ["-c"]
    # Not this file, which what is pickled would be looked for in.
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(eval(sys.stdin.readline()), main.__dict__)  # noqa: S307 - as Python's own `-c` would


def _nursery() -> types.ModuleType:
    """`tests/nursery.py`, under no name: the test run imports its own."""
    spec = importlib.util.spec_from_file_location("nursery", Path(__file__).with_name("nursery.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy(path: str, *_: str) -> None:
    """Hand the standard streams over, and wait until the copy ends."""
    connection, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            connection.connect(path)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            break
    socket.send_fds(connection, [b"."], [0, 1, 2])
    connection.recv(1)


if __name__ == "__main__":
    {"serve": serve, "copy": copy}[sys.argv[1]](*sys.argv[2:])
