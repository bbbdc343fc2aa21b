"""Ends a run at any moment: stops all of its processes, frozen ones too, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: Environment variable of every process of an instance, whichever process started it.
MARK = "QUIRE_DATA_DIR"
#: A killed process with much memory takes a while to exit.
KILL_TIMEOUT_S, POLL_INTERVAL_S = 20.0, 0.02


def processes_of(data_dir: Path) -> list[int]:
    """Return all processes that use this data folder, orphans included. Zombies, which have no
    environment any more, are left out.
    """
    mark = b"\0" + os.fsencode(f"{MARK}={data_dir}") + b"\0"
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # the process has exited, or belongs to another user
                if mark in b"\0" + (entry / "environ").read_bytes():
                    pids.append(int(entry.name))
    return sorted(pids)


def end_all(data_dir: Path) -> None:
    """Kill all processes that use this data, which is disposable.

    A process may start another one while it is killed, so this repeats until none is left.
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
    """Run `work` in a thread, and wait for its end even if cancelled: the cleanup must know what it
    starts or writes.
    """
    doing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.gather(doing, return_exceptions=True)
        raise
