"""What this process's control groups leave it of memory and of CPU time.

Linux, versions 1 and 2 of control groups: a limit of any group on the way to the root counts. Where
no file says otherwise there is no limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def memory_left() -> int | None:
    """Bytes until the tightest limit; file pages that can be dropped count as left. None: no limit.

    Never below 0.
    """
    left = [
        *(_left(group, "memory.max", "memory.current", "") for group in _groups("")),
        *(
            _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            for group in _groups("memory")
        ),
    ]
    found = [value for value in left if value is not None]
    return max(0, min(found)) if found else None


def cpu_quota() -> float | None:
    """CPUs' worth of time that this process may use; None: no limit."""
    quotas = []
    for group in _groups(""):
        words = (_read(group / "cpu.max") or "max").split()
        if len(words) == 2:
            quotas.append((_number(words[0]), _number(words[1])))
    for group in _groups("cpu"):
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        quotas.append((_number(quota), _number(period)))
    found = [quota / period for quota, period in quotas if quota and period]
    return min(found) if found else None


def usable_cpus(count: int) -> int:
    """At most `count` CPUs, as many as the quota keeps busy, at least 1.

    More threads than that are all stopped together when the quota of a period is spent.
    """
    quota = cpu_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's groups, its own first; "" stands for version 2.

    In a container what `MEMBERSHIP` says may lie outside of what is mounted: then it's the root.
    """
    mounted = ROOT / controller if controller else ROOT
    own = mounted
    for line in (_read(MEMBERSHIP) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(",") and ".." not in path:
            own = mounted / path.lstrip("/")
    while own != mounted:
        if own.is_dir():
            yield own
        own = own.parent
    yield mounted


def _left(group: Path, limit_name: str, used_name: str, prefix: str) -> int | None:
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
    """A file's text; None where there is no such file."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("ascii").strip()
    except (OSError, ValueError):
        return None


def _number(text: str | None) -> int | None:
    """A whole number; None for "max", -1 and whatever else sets no limit."""
    return int(text) if text is not None and text.isdigit() else None
