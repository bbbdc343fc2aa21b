"""What the operating system and Python say of this process."""

from __future__ import annotations

import gc
import os
import resource
import time
from functools import lru_cache
from pathlib import Path

from engine.contract.replica_state import ProcessStats

_PROC = Path("/proc/self")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def process_stats() -> ProcessStats:
    """As of now; where there is no /proc, memory and file descriptors stay 0."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    stats = ProcessStats(
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        start_time=_start_time(),
        max_fds=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
    for generation in gc.get_stats():
        stats.gc_collections.append(generation["collections"])
        stats.gc_collected.append(generation["collected"])
        stats.gc_uncollectable.append(generation["uncollectable"])
    try:
        virtual, resident = (_PROC / "statm").read_text().split()[:2]
        stats.virtual_bytes, stats.resident_bytes = int(virtual) * _PAGE, int(resident) * _PAGE
        stats.open_fds = len(os.listdir(_PROC / "fd"))
    except OSError:
        pass  # not Linux
    return stats


@lru_cache(maxsize=1)
def _start_time() -> float:
    """When this process began, in seconds since the epoch."""
    try:
        # After the command's name, which may hold anything but its last bracket.
        fields = (_PROC / "stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime + int(fields[19]) / _TICKS
    except OSError:
        return time.time()
