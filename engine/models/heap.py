"""Giving back what the heap holds and nobody uses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


@cache
def _trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None where the C library is another one."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


def trim_heap() -> None:
    """Give pages of freed memory back to the system.

    glibc keeps what lies below anything that is still there: a load that takes some megabytes for a
    while between small things that stay would end a quarter larger than its weights.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


class SparingTrim:
    """`trim_heap`, after every so many calls: each costs as much as reading one or two pieces."""

    EVERY = 32

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self) -> None:
        """A piece has been read."""
        self._calls += 1
        if self._calls % self.EVERY == 0:
            trim_heap()
