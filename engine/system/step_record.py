"""What a replica works on, kept where its supervisor can read it after the replica's death.

A replica that is killed says no more what it was at. So before each step it writes into memory
that it shares with its supervisor whose requests the step holds: of a request that kills its
replicas that tells those that merely ran beside it, and those that waited.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

#: The number of the file that a replica inherits.
VARIABLE = "QUIRE_STEP_RECORD"
#: Bytes of one list of ids; one that is longer is not known.
ROOM = 1 << 18
_HEAD, _LENGTH = 64, 4
_UNKNOWN = 2 ** (8 * _LENGTH) - 1
_SIZE = _HEAD + 2 * (_LENGTH + ROOM)


class LastStep(NamedTuple):
    """What a dead replica was at.

    `held`: ids of the requests of its steps under way, or of one that it was taking in; None: it's
    not known.
    """

    incarnation: str
    held: list[str] | None


class SharedStepRecord:
    """A supervisor's side: memory for one replica process, to be read once that is dead."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

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
        """What the replica must have in its environment; it must inherit `fd`, too."""
        return {VARIABLE: str(self.fd)}

    def read(self) -> LastStep | None:
        """What was written last; None: nothing was."""
        head = os.pread(self.fd, _HEAD, 0)
        at = head[0]
        if not at:
            return None
        start = _place(at)
        length = int.from_bytes(os.pread(self.fd, _LENGTH, start), "little")
        held = None
        if length != _UNKNOWN:
            text = os.pread(self.fd, length, start + _LENGTH).decode()
            held = text.split("\n") if text else []
        return LastStep(head[1:].rstrip(b"\0").decode(), held)

    def close(self) -> None:
        """Let the memory go."""
        os.close(self.fd)


class SharedStepWriter:
    """A replica's side.

    Two places take turns, and one byte says which of them counts: a list that the process died
    over is never read.

    Attributes:
        held: the ids that were written last.
    """

    def __init__(self, incarnation: str, fd: int | None) -> None:
        """`fd`: the file that a supervisor reads; None: nobody does."""
        self.held: list[str] = []
        self._memory = None if fd is None else mmap.mmap(fd, _SIZE)
        if self._memory is not None:
            told = incarnation.encode()[: _HEAD - 1]
            self._memory[1 : 1 + len(told)] = told
            self.write([])

    @classmethod
    def inherited(cls, incarnation: str, environment: Mapping[str, str] = os.environ) -> Self:
        """For what a supervisor has left, if one has."""
        number = environment.get(VARIABLE)
        return cls(incarnation, None if number is None else int(number))

    def write(self, held: Sequence[str]) -> None:
        """From here on the process is at these requests."""
        self.held = list(held)
        memory = self._memory
        if memory is None:
            return
        at = 2 if memory[0] == 1 else 1
        start = _place(at)
        text = "\n".join(held).encode()
        length = len(text) if len(text) <= ROOM else _UNKNOWN
        memory[start : start + _LENGTH] = length.to_bytes(_LENGTH, "little")
        if length != _UNKNOWN:
            memory[start + _LENGTH : start + _LENGTH + length] = text
        memory[0] = at


def _place(at: int) -> int:
    """Where place 1 or 2 begins."""
    return _HEAD + (at - 1) * (_LENGTH + ROOM)
