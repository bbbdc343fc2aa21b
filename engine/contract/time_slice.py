"""Threads that have little to do each time, and that others wait for, run as soon as they can.

An engine keeps every core busy, so a thread that wakes up beside it (Redis, a gateway's event loop,
the thread that writes a step's tokens) may wait until the running one's turn is over, at each
hand-over of a token's way: 3.4 ms at p90 beside three busy processes on two cores, 0.1 with short
turns. Linux's scheduler (EEVDF) lets a thread ask for them from 6.12 on, as the `sched_runtime` of
`sched_setattr(2)` for SCHED_OTHER: it gets no more of the processor, but gets it sooner. It needs
no rights. Older kernels have no such wish, and nothing changes there.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct

log = logging.getLogger(__name__)

#: Nanoseconds; the kernel takes 0.1 to 100 ms, and has 2.8 ms where nothing is asked for.
SHORT_NS = 500_000
#: The call's number, by machine; the C library has a function for it only since glibc 2.41.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
#: struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period.
_ATTR = struct.Struct("<IIQiIQQQ")


def ask_for_short_turns(thread_id: int = 0) -> bool:
    """Short turns for a thread, and for those that it starts from now on.

    Args:
        thread_id: of a process of the same user (its first thread); 0: the thread that calls.

    Returns whether the kernel took it. A thread that isn't scheduled in the usual way (SCHED_OTHER)
    stays as its operator wants it.
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
