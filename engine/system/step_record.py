"""What a replica works on, kept where its supervisor can read it after the replica's death.

A replica that is killed says no more what it was at. So before each step it writes into memory
that it shares with its supervisor whose requests the step holds: of a request that kills its
replicas that tells those that merely ran beside it, and those that waited.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

#: The number of the file that a replica inherits.
VARIABLE = "QUIRE_STEP_RECORD"
#: Maximum bytes of a list of ids; a longer one is recorded as unknown.
MAX_IDS_BYTES = 1 << 18
_HEAD, _LENGTH = 64, 4
_UNKNOWN = 2 ** (8 * _LENGTH) - 1
_FAULT_START = _HEAD + 2 * (_LENGTH + MAX_IDS_BYTES)
_FAULT_BYTES = 1024
_SIZE = _FAULT_START + _FAULT_BYTES


class LastStep(NamedTuple):
    """The last step of a dead replica.

    `request_ids`: requests of its running steps, or the one that it was admitting; None: unknown.
    """

    incarnation: str
    request_ids: list[str] | None


class SharedStepRecord:
    """A supervisor's side: memory shared with a replica process, read after its death.

    The memory is released with the last reference.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        # The slot and the thread that watches the process both read it, whichever is first.
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls) -> Self | None:
        """New memory; None where the system has none that processes share (Linux does).

        Raises OSError when there are too many open files.
        """
        if not hasattr(os, "memfd_create"):
            return None
        fd = os.memfd_create("quire-step")
        os.truncate(fd, _SIZE)
        return cls(fd)

    @property
    def environment(self) -> dict[str, str]:
        """The environment that the replica must have; it must inherit `fd`, too."""
        return {VARIABLE: str(self.fd)}

    def read(self) -> LastStep | None:
        """The last record, or None."""
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
        return LastStep(head[1:].rstrip(b"\0").decode(), request_ids)

    def read_fault(self) -> str:
        """Why the replica stopped by itself; "": it gave no reason."""
        text = os.pread(self.fd, _FAULT_BYTES, _FAULT_START).rstrip(b"\0")
        return text.decode(errors="ignore")


class SharedStepWriter:
    """A replica's side.

    It writes to two slots in turn, and one byte names the valid one: a list is never read half
    written.

    Attributes:
        request_ids: the ids that were written last.
    """

    def __init__(self, incarnation: str, fd: int | None) -> None:
        """`fd`: the shared memory; None without a supervisor."""
        self.request_ids: list[str] = []
        self._memory = None if fd is None else mmap.mmap(fd, _SIZE)
        if self._memory is not None:
            name = incarnation.encode()[: _HEAD - 1]
            self._memory[1 : 1 + len(name)] = name
            self.write([])

    @classmethod
    def inherited(cls, incarnation: str, environment: Mapping[str, str] = os.environ) -> Self:
        """Write to the memory that a supervisor has passed on, if any."""
        number = environment.get(VARIABLE)
        return cls(incarnation, None if number is None else int(number))

    def write(self, request_ids: Sequence[str]) -> None:
        """Record the requests that the process works on from now on."""
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
        """Record why the process ends, such as a rank that it has lost."""
        if self._memory is not None:
            text = reason.encode()[:_FAULT_BYTES]
            self._memory[_FAULT_START : _FAULT_START + len(text)] = text


def _slot_offset(slot: int) -> int:
    """Offset of slot 1 or 2."""
    return _HEAD + (slot - 1) * (_LENGTH + MAX_IDS_BYTES)
