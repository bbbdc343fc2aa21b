"""`RankMemory`: memory that the ranks of a model share."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

from engine.distributed.parallel_state import ParallelState
from kernels.interface import KernelSet, RankGroup
from kernels.ranks import Exchange

#: Timeout of a gather. Ranks run the same layers at the same time: one that is later than this
#: won't come.
GATHER_TIMEOUT_S = 10.0
#: Layout of heartbeat counts, which follow the failure flag.
_BEAT = struct.Struct("<Q")
_FLAG = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A failure flag and the heartbeats of all ranks, in one page, followed by each stage's memory
    for gathers.

    Attributes:
        descriptor: of the file, which has no name: processes inherit it.
        state: this process's ranks.
    """

    descriptor: int
    state: ParallelState
    pages: mmap.mmap

    @classmethod
    def create(cls, state: ParallelState, num_bytes: int) -> RankMemory:
        """Create it in the first rank; `num_bytes`: for the kernels of a stage. Raises OSError."""
        descriptor = os.memfd_create("quire-ranks")
        num_pages = -(-num_bytes // mmap.PAGESIZE)
        os.ftruncate(descriptor, mmap.PAGESIZE * (1 + state.pipeline_parallel_size * num_pages))
        return cls.open(descriptor, state)

    @classmethod
    def open(cls, descriptor: int, state: ParallelState) -> RankMemory:
        """Open it in another rank, which has inherited the descriptor. Raises OSError."""
        return cls(descriptor, state, mmap.mmap(descriptor, 0))

    def beat(self) -> None:
        """Record a heartbeat of this rank."""
        count = self.num_beats(self.state.rank)
        _BEAT.pack_into(self.pages, self._beat_offset(self.state.rank), count + 1)

    def num_beats(self, rank: int) -> int:
        """Number of heartbeats of a rank."""
        count: int = _BEAT.unpack_from(self.pages, self._beat_offset(rank))[0]
        return count

    @staticmethod
    def _beat_offset(rank: int) -> int:
        return _FLAG.size + _BEAT.size * rank

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed since the latest reset: then no rank waits for another."""
        return bool(_FLAG.unpack_from(self.pages)[0])

    def set_failed(self, failed: bool) -> None:
        """Set or clear the flag."""
        _FLAG.pack_into(self.pages, 0, failed)

    def join(
        self, ops: KernelSet, stage: int | None = None, exchange: Exchange | None = None
    ) -> RankGroup:
        """This rank's side of its stage's group; of another `stage` the first rank's, by which its
        gathers can be made to fail.

        `exchange`: for ranks of several machines. Raises ValueError for kernels without ranks.
        """
        state = self.state
        size = (len(self.pages) - mmap.PAGESIZE) // state.pipeline_parallel_size
        rank = state.tensor_rank if stage is None else 0
        offset = mmap.PAGESIZE + size * (state.stage if stage is None else stage)
        kernels = mmap.mmap(self.descriptor, size, offset=offset)
        if exchange is not None:  # others of this machine exchange as well
            kernels = mmap.mmap(-1, size)
        return ops.join_ranks(kernels, rank, state.tensor_parallel_size, GATHER_TIMEOUT_S, exchange)
