"""Ending the connections of a process that goes on running."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

#: Of Linux since 5.6, on all architectures.
_PIDFD_GETFD = 438


def end_connections(pid: int) -> int:
    """Shut down all sockets of a process, which finds them ended as if the other side had.

    Returns their number. Raises OSError where this process may not trace that one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    process, count = os.pidfd_open(pid), 0
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # Closed meanwhile, as when the process ends, which loses others.
            with suppress(FileNotFoundError, ProcessLookupError):
                if not os.readlink(link).startswith("socket:"):
                    continue
                descriptor = libc.syscall(_PIDFD_GETFD, process, int(link.name), 0)
                if descriptor < 0:
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number))
                with socket.socket(fileno=descriptor) as connection, suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    finally:
        os.close(process)
    return count
