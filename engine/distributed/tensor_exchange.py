"""`TensorExchange`: what ranks of several machines gather goes through connections."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from torch import Tensor

from engine.distributed.memory import GATHER_TIMEOUT_S, RankMemory
from engine.distributed.pipeline import TensorConnection
from kernels.errors import RankTimeout


class TensorExchange:
    """This rank's connections to the others of its stage.

    Every rank gets what each has computed, as it has computed it: the sums and their bits are those
    of ranks that share memory.
    """

    def __init__(self, memory: RankMemory, descriptors: Sequence[int]) -> None:
        """`descriptors`: of sockets to the other ranks, in their order."""
        state = memory.state
        self._tensor_rank = state.tensor_rank
        peers = [rank for rank in range(state.tensor_parallel_size) if rank != self._tensor_rank]
        first = state.stage * state.tensor_parallel_size
        self._connections = {
            rank: TensorConnection(socket.socket(fileno=descriptor), memory, first + rank)
            for rank, descriptor in zip(peers, descriptors, strict=True)
        }

    def exchange(self, slots: Sequence[Tensor]) -> None:
        """See `kernels.ranks.Exchange`."""
        # A slot is written again two gathers later, which begin once all have read this one.
        local = slots[self._tensor_rank][None]
        for connection in self._connections.values():
            connection.send(local)
        for rank, connection in self._connections.items():
            try:
                slots[rank].copy_(connection.receive(1, len(slots[rank]), GATHER_TIMEOUT_S)[0])
            except RankTimeout as error:
                raise RankTimeout(rank, str(error)) from error

    def reset(self) -> None:
        """See `kernels.ranks.Exchange`."""
        for connection in self._connections.values():
            connection.reset()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
