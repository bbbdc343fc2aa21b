"""A replica's current work, in memory that its supervisor can read after the replica's death.

A killed replica can't report what it was doing. So before each step it writes the ids of the
step's requests to memory shared with its supervisor. When a request kills its replicas, this
distinguishes it from requests that ran beside it or were waiting.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

#: The environment variable with the file descriptor that a replica inherits.
VARIABLE = "QUIRE_STEP_RECORD"
#: Maximum bytes of a list of ids; longer lists are recorded as unknown.
MAX_IDS_BYTES = 1 << 18
_HEAD, _LENGTH = 64, 4
_UNKNOWN = 2 ** (8 * _LENGTH) - 1
_FAULT_START = _HEAD + 2 * (_LENGTH + MAX_IDS_BYTES)
_FAULT_BYTES = 1024
_SIZE = _FAULT_START + _FAULT_BYTES


class LastStep(NamedTuple):
    """The last step of a dead replica.

    `request_ids` are the requests of its running steps, or the request that it was admitting; None
    if unknown.
    """

    incarnation: str
    request_ids: list[str] | None


class SharedStepRecord:
    """The supervisor's side: memory shared with a replica process, read after its death.

    The memory is released with the last reference.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        # Read by the slot and by the thread that watches the process, in either order.
        weakref.finalize(self, os.close, fd)
        self._is_innocent = False

    @classmethod
    def create(cls) -> Self | None:
        """Create the memory; None on systems without anonymous shared files (Linux has them).

        Raises OSError when there are too many open files.
        """
        if not hasattr(os, "memfd_create"):
            return None
        fd = os.memfd_create("quire-step")
        os.truncate(fd, _SIZE)
        return cls(fd)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment for the replica, which must inherit `fd` as well."""
        return {VARIABLE: str(self.fd)}

    def acquit(self) -> None:
        """Let `read` name no requests: the replica ends by another's fault."""
        self._is_innocent = True

    def read(self) -> LastStep | None:
        head = os.pread(self.fd, _HEAD, 0)
        slot = head[0]
        if not slot:
            return None
        start = _slot_offset(slot)
        length = int.from_bytes(os.pread(self.fd, _LENGTH, start), "little")
        request_ids = None
        if length != _UNKNOWN:
            text = os.pread(self.fd, length, start + _LENGTH).decode()
            request_ids = text.split("\n") if text else []
        incarnation = head[1:].rstrip(b"\0").decode()
        return LastStep(incarnation, [] if self._is_innocent else request_ids)

    def read_fault(self) -> str:
        """Return the reason why the replica stopped by itself; "" if it recorded none."""
        text = os.pread(self.fd, _FAULT_BYTES, _FAULT_START).rstrip(b"\0")
        return text.decode(errors="ignore")


class SharedStepWriter:
    """The replica's side.

    It alternates between two slots, and one byte names the valid one, so that a partially written
    list is never read.

    Attributes:
        request_ids: the most recently written ids.
    """

    def __init__(self, incarnation: str, fd: int | None) -> None:
        """`fd` is the shared memory's descriptor; None without a supervisor."""
        self.request_ids: list[str] = []
        self._memory = None if fd is None else mmap.mmap(fd, _SIZE)
        if self._memory is not None:
            name = incarnation.encode()[: _HEAD - 1]
            self._memory[1 : 1 + len(name)] = name
            self.write([])

    @classmethod
    def inherited(cls, incarnation: str, environment: Mapping[str, str] = os.environ) -> Self:
        """Return a writer to the memory inherited from a supervisor, if any."""
        number = environment.get(VARIABLE)
        return cls(incarnation, None if number is None else int(number))

    def write(self, request_ids: Sequence[str]) -> None:
        """Record the requests that the process is about to work on."""
        self.request_ids = list(request_ids)
        memory = self._memory
        if memory is None:
            return
        slot = 2 if memory[0] == 1 else 1
        start = _slot_offset(slot)
        text = "\n".join(request_ids).encode()
        length = len(text) if len(text) <= MAX_IDS_BYTES else _UNKNOWN
        memory[start : start + _LENGTH] = length.to_bytes(_LENGTH, "little")
        if length != _UNKNOWN:
            memory[start + _LENGTH : start + _LENGTH + length] = text
        memory[0] = slot

    def write_fault(self, reason: str) -> None:
        """Record why the process ends, such as a lost rank."""
        if self._memory is not None:
            text = reason.encode()[:_FAULT_BYTES]
            self._memory[_FAULT_START : _FAULT_START + len(text)] = text


def _slot_offset(slot: int) -> int:
    return _HEAD + (slot - 1) * (_LENGTH + MAX_IDS_BYTES)
