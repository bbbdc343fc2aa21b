"""`RankMemory`: memory that the ranks of a model share."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

from kernels.interface import KernelSet, RankGroup

#: A gather waits for so long. Ranks run the same layers at the same time: one that comes later than
#: this doesn't come.
GATHER_TIMEOUT_S = 10.0
_BEAT = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The heartbeats of `size` ranks, a page, then what their kernels gather through.

    Attributes:
        descriptor: of the file, which has no name: processes inherit it.
        rank: this process's.
    """

    descriptor: int
    rank: int
    size: int
    pages: mmap.mmap

    @classmethod
    def create(cls, size: int, num_bytes: int) -> RankMemory:
        """Of the first rank; `num_bytes` for the kernels. Raises OSError."""
        descriptor = os.memfd_create("quire-ranks")
        os.ftruncate(descriptor, mmap.PAGESIZE + num_bytes)
        return cls.open(descriptor, 0, size)

    @classmethod
    def open(cls, descriptor: int, rank: int, size: int) -> RankMemory:
        """Of another rank, which has inherited the descriptor. Raises OSError."""
        return cls(descriptor, rank, size, mmap.mmap(descriptor, 0))

    def beat(self) -> None:
        """Say that this rank lives."""
        (count,) = _BEAT.unpack_from(self.pages, _BEAT.size * self.rank)
        _BEAT.pack_into(self.pages, _BEAT.size * self.rank, count + 1)

    def num_beats(self, rank: int) -> int:
        """How often a rank has said so."""
        count: int = _BEAT.unpack_from(self.pages, _BEAT.size * rank)[0]
        return count

    def join(self, ops: KernelSet) -> RankGroup:
        """This rank's side of the group. Raises ValueError for kernels without ranks."""
        kernels = mmap.mmap(self.descriptor, len(self.pages) - mmap.PAGESIZE, offset=mmap.PAGESIZE)
        return ops.join_ranks(kernels, self.rank, self.size, GATHER_TIMEOUT_S)
