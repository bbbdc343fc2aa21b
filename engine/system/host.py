"""Scheduling, CPU quota and memory limits of this process.

Limits of Linux's control groups, versions 1 and 2, apply from every group on the path to the
root. A group without a limit file has no limit.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

#: Nanoseconds. The kernel accepts 0.1 to 100 ms; its default is 2.8 ms.
SHORT_NS = 500_000
#: The system call's number by machine; glibc only has a function for it since 2.41.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
#: struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period.
_ATTR = struct.Struct("<IIQiIQQQ")


def request_short_time_slice(thread_id: int = 0) -> bool:
    """Request short time slices for a thread and those that it starts from now on.

    An engine keeps every core busy, so a thread that wakes up (Redis, a gateway's event loop, the
    thread that writes a step's tokens) may wait for the running thread's time slice to end: 3.4 ms
    at p90 next to three busy processes on two cores, 0.1 ms with short slices. Linux's EEVDF
    supports them from 6.12 on, as `sched_runtime` of `sched_setattr(2)` for SCHED_OTHER: the thread
    gets no more CPU time, but gets it sooner, and needs no privileges. Older kernels ignore it.

    Args:
        thread_id: the thread, of a process of the same user; 0 for the calling thread.

    Returns whether the kernel accepted it. Threads with a policy other than SCHED_OTHER are left
    unchanged.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    try:
        if os.sched_getscheduler(thread_id) != os.SCHED_OTHER:
            return False
        nice = os.getpriority(os.PRIO_PROCESS, thread_id)
    except OSError as error:
        log.debug("How thread %d is scheduled can't be read: %s", thread_id, error)
        return False
    attr = ctypes.create_string_buffer(
        _ATTR.pack(_ATTR.size, os.SCHED_OTHER, 0, nice, 0, SHORT_NS, 0, 0)
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(thread_id), attr, ctypes.c_uint(0)):
        log.debug("Short turns were refused: %s", os.strerror(ctypes.get_errno()))
        return False
    return True


ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_cgroup_memory() -> int | None:
    """Return the bytes left below the tightest limit, or None if there is no limit.

    Reclaimable file pages count as available. The result is never negative.
    """
    remaining = [
        *(_remaining(group, "memory.max", "memory.current", "") for group in _groups("")),
        *(
            _remaining(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            for group in _groups("memory")
        ),
    ]
    values = [value for value in remaining if value is not None]
    return max(0, min(values)) if values else None


def cpu_quota() -> float | None:
    """Return how many CPUs' time this process may use; None if there is no limit."""
    quotas = []
    for group in _groups(""):
        words = (_read(group / "cpu.max") or "max").split()
        if len(words) == 2:
            quotas.append((_number(words[0]), _number(words[1])))
    for group in _groups("cpu"):
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        quotas.append((_number(quota), _number(period)))
    ratios = [quota / period for quota, period in quotas if quota and period]
    return min(ratios) if ratios else None


def num_usable_cpus(count: int) -> int:
    """Return the number of CPUs that the quota can keep busy: from 1 to `count`.

    With more threads, all of them are stopped whenever a period's quota is used up.
    """
    quota = cpu_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def _groups(controller: str) -> Iterator[Path]:
    """Return folders of this process's groups, its own first; "" stands for version 2.

    In a container the path in `MEMBERSHIP` may be outside the mounted tree: then it's the root.
    """
    mounted = ROOT / controller if controller else ROOT
    group = mounted
    for line in (_read(MEMBERSHIP) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(",") and ".." not in path:
            group = mounted / path.lstrip("/")
    while group != mounted:
        if group.is_dir():
            yield group
        group = group.parent
    yield mounted


def _remaining(group: Path, limit_name: str, used_name: str, prefix: str) -> int | None:
    if (limit := _number(_read(group / limit_name))) is None:
        return None
    if (used := _number(_read(group / used_name))) is None:
        return None
    droppable = 0
    for line in (_read(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in (f"{prefix}inactive_file", f"{prefix}active_file"):
            droppable += _number(value) or 0
    return limit - max(0, used - droppable)


def _read(path: Path) -> str | None:
    """Return a file's text, or None if it doesn't exist."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("ascii").strip()
    except (OSError, ValueError):
        return None


def _number(text: str | None) -> int | None:
    """Parse a whole number; None for "max", -1 and other values that mean no limit."""
    return int(text) if text is not None and text.isdigit() else None


def total_memory() -> int:
    """Return the size in bytes of this machine's memory, or of the tightest cgroup limit."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [
        *(_number(_read(group / "memory.max")) for group in _groups("")),
        *(_number(_read(group / "memory.limit_in_bytes")) for group in _groups("memory")),
    ]
    return min([installed, *(limit for limit in limits if limit is not None)])


#: Tokens in the KV cache of the replica in whose place this process serves, and which then ends.
PREDECESSOR_VARIABLE = "QUIRE_PREDECESSOR_TOKENS"


def available_memory() -> int:
    """Return the bytes that are available without swapping and within the cgroups' limits."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
    except OSError as error:
        log.debug("/proc/meminfo can't be read (%s); counting free pages only", error)
    remaining = available_cgroup_memory()
    return free if remaining is None else min(free, remaining)
