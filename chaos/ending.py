"""Ending a run at any moment: what it started goes, frozen processes too, and nothing stays."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: What each process of an instance has in its environment, whoever started it.
MARK = "QUIRE_DATA_DIR"
#: A killed process with much memory is there for a while.
KILL_TIMEOUT_S, POLL_INTERVAL_S = 20.0, 0.02


def processes_of(data_dir: Path) -> list[int]:
    """All that run on this folder's data, orphans too. A dead one that waits for its parent has no
    environment any more, and isn't among them.
    """
    mark = b"\0" + os.fsencode(f"{MARK}={data_dir}") + b"\0"
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended, or is another user's
                if mark in b"\0" + (entry / "environ").read_bytes():
                    pids.append(int(entry.name))
    return sorted(pids)


def end_all(data_dir: Path) -> None:
    """Kill all that run on this data: nothing of it is worth a process's patience.

    A process may start another one while it's killed, so it's looked again until there's none.
    Raises TimeoutError.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while pids := processes_of(data_dir):
        if time.monotonic() > deadline:
            raise TimeoutError(f"Processes {pids} are there {KILL_TIMEOUT_S:.0f} s after a kill.")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)


async def to_its_end(work: Callable[[], object]) -> None:
    """Do it in a thread. Who is cancelled meanwhile waits for it: what it starts or writes must be
    known when all is put away.
    """
    doing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.gather(doing, return_exceptions=True)
        raise
