"""How long a thread's turns of the processor are, as the kernel tells."""

from __future__ import annotations

import ctypes
import platform
import struct

import pytest

_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
_KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])
keeps_slices = pytest.mark.skipif(_KERNEL < (6, 12), reason="the kernel is older than 6.12")


def turn_ns(thread_id: int = 0) -> int:
    """What `sched_getattr` says of a thread, or of the one that asks."""
    attr = ctypes.create_string_buffer(48)
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SCHED_GETATTR[platform.machine()]
    if libc.syscall(number, thread_id, attr, 48, 0):
        raise OSError(ctypes.get_errno(), "sched_getattr")
    return int(struct.unpack("<IIQiIQQQ", attr.raw)[5])
