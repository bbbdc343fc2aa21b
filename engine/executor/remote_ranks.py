"""`RemoteRanks`: ranks that may be on other machines, as the first one sees them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import torch.distributed as dist

from engine.distributed.beats import BeatLink
from engine.distributed.channel import Channel
from engine.distributed.parallel_state import ParallelState
from engine.distributed.rendezvous import (
    MEMORY_KEY,
    STORE_PREFIX,
    Rendezvous,
    rank_links,
    stage_sockets,
)
from engine.executor.rank_process import JoinArguments
from engine.executor.rank_processes import RankHandle, RankProcesses


class NodeRank:
    """A rank that another node has started. Its connections tell whether it is alive."""

    pid = 0

    def poll(self) -> str:
        return ""

    def kill(self) -> None:
        """Do nothing: it exits when its connections are closed."""

    def on_closing(self) -> None:
        """Do nothing: it exits when its connections are closed."""

    def wait(self, timeout_s: float) -> None:
        """Do nothing: it exits when its connections are closed."""


class RemoteRanks(RankProcesses):
    """Ranks 1 to size - 1, which connect to the first one through a store that it hosts.

    Raises `EngineFault` if one doesn't connect, and OSError if `host` can't be bound.
    """

    def __init__(
        self,
        state: ParallelState,
        num_bytes: int,
        host: str,
        port: int,
        start: Callable[[JoinArguments], Sequence[RankHandle]],
    ) -> None:
        """`host`, `port`: address of the store; port 0: any port. `start`: has the ranks
        connect.
        """
        try:
            listener = socket.create_server((host, port))
        except OSError as error:
            raise OSError(f"{host}:{port} can't be listened at: {error}") from error
        # The store itself would listen on all addresses.
        store = dist.TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._store: dist.Store | None = store
        handles = list(start(JoinArguments(host, store.port, state)))
        try:
            meeting = Rendezvous(
                dist.PrefixStore(STORE_PREFIX, store), state, host, lambda: _find_lost(handles)
            )
            meeting.write(MEMORY_KEY, str(num_bytes))
            self.memory = meeting.share_memory(num_bytes)
            ends = meeting.connect(rank_links(state))
        except BaseException:
            for handle in handles:
                handle.kill()
            for handle in handles:
                handle.wait(0.0)
            raise
        self.local_ranks = meeting.local_ranks
        self.stage_sockets = stage_sockets(state, ends)

        def sockets(kind: str) -> list[socket.socket]:
            return [socket.socket(fileno=ends[r, kind]) for r in range(1, state.world_size)]

        self._begin(
            handles,
            [Channel(connection) for connection in sockets("commands")],
            [Channel(connection) for connection in sockets("adapters")],
            [BeatLink(connection) for connection in sockets("beats")],
        )

    def close(self) -> None:
        super().close()
        self._store = None  # stops it: the next engine's store uses the same port


def _find_lost(handles: Sequence[RankHandle]) -> str:
    """Why a rank can't join, as a message; "": all can."""
    for rank, handle in enumerate(handles, 1):
        if reason := handle.poll():
            return f"Rank {rank} {reason}."
    return ""
