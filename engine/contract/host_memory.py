"""Memory of this machine that an engine may take. Torch-free."""

from __future__ import annotations

import logging
import os

from engine.contract.cgroup import memory_left

log = logging.getLogger(__name__)


def available_memory() -> int:
    """Bytes that can be taken without swapping, by /proc/meminfo, and within cgroups' limits."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
    except OSError as error:
        log.debug("/proc/meminfo can't be read (%s); counting free pages only", error)
    left = memory_left()
    return free if left is None else min(free, left)
