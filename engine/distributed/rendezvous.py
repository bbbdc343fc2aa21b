"""`Rendezvous`: ranks that were started apart find each other through a store of torch.distributed.

Ranks of one machine share memory, and those that exchange messages connect by TCP. A connection
begins with a token that only members of the group can read in the store.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from engine.contract.errors import EngineFault
from engine.distributed.memory import RankMemory
from engine.distributed.parallel_state import ParallelState
from engine.distributed.pipeline import StageSockets

#: Machines may start minutes apart.
JOIN_TIMEOUT_S = 300.0
#: Timeout of a connection's first message; connections without it aren't from a rank.
_HELLO_TIMEOUT_S = 5.0
_POLL_S = 0.05
#: The prefix of the keys of an engine's ranks, and the key of their memory's size.
STORE_PREFIX, MEMORY_KEY = "quire", "memory_bytes"
_HELLO = struct.Struct("<16sI16s")


class Link(NamedTuple):
    """A connection that rank `source` opens to rank `target`, for messages of one kind."""

    source: int
    target: int
    kind: str


def stage_links(state: ParallelState) -> list[Link]:
    """The connections between stages; none where there is one stage."""
    return [
        link
        for rank in range(state.logits_rank)
        for link in (
            Link(rank, rank + state.tensor_parallel_size, "stage"),
            Link(rank, state.logits_rank, "logits"),
        )
    ]


def tensor_links(state: ParallelState, machines: Sequence[str]) -> list[Link]:
    """The connections between the ranks of each stage that isn't on one machine. `machines`: of all
    ranks.
    """
    links = []
    for stage in range(state.pipeline_parallel_size):
        first = stage * state.tensor_parallel_size
        ranks = range(first, first + state.tensor_parallel_size)
        if len({machines[rank] for rank in ranks}) > 1:
            links += [Link(high, low, "tensors") for low in ranks for high in ranks if low < high]
    return links


def rank_links(state: ParallelState) -> list[Link]:
    """Three from each rank to the first one."""
    return [
        *(
            Link(rank, 0, kind)
            for rank in range(1, state.world_size)
            for kind in ("commands", "adapters", "beats")
        ),
    ]


def stage_sockets(state: ParallelState, descriptors: Mapping[tuple[int, str], int]) -> StageSockets:
    """A rank's ends of `stage_links` and `tensor_links`. `descriptors`: by the rank on the other
    side, and kind.
    """
    size = state.tensor_parallel_size

    def of_kind(kind: str) -> tuple[int, ...]:
        return tuple(
            descriptor for (_, other), descriptor in sorted(descriptors.items()) if other == kind
        )

    return StageSockets(
        previous=descriptors.get((state.rank - size, "stage")),
        next=descriptors.get((state.rank + size, "stage")),
        logits=of_kind("logits"),
        tensors=of_kind("tensors"),
    )


def machine_id() -> str:
    """Equal for processes that can open each other's files in /proc and have one network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = (os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "net"))
    return "-".join([boot, *map(str, namespaces)])


def local_address(remote: str) -> str:
    """This machine's address as `remote` sees it. Raises OSError where there is no way there."""
    family, *_, address = socket.getaddrinfo(remote, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        host: str = probe.getsockname()[0]
        return host


def open_store(host: str, port: int) -> dist.Store:
    """The store that the first rank has, or is about to have. Raises `EngineFault`."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_TIMEOUT_S))
    except RuntimeError as error:
        raise EngineFault(f"No first rank is at {host}:{port}: {error}") from error


class Rendezvous:
    """One rank among those that meet in `store`.

    Attributes:
        state: this rank.
        local_ranks: those of this machine.

    Raises `EngineFault` for a rank that doesn't come within `JOIN_TIMEOUT_S`.
    """

    def __init__(
        self,
        store: dist.Store,
        state: ParallelState,
        master: str,
        find_failure: Callable[[], str] = str,
    ) -> None:
        """`master`: a host that all ranks can reach. `find_failure`: why it's of no use to wait for
        the others any longer; "": it may be.
        """
        self._store, self.state, self._find_failure = store, state, find_failure
        if state.rank == 0:
            store.set("token", secrets.token_hex(8))
        store.set(f"machine/{state.rank}", machine_id())
        self._machines = machines = [
            self.read(f"machine/{rank}", rank) for rank in range(state.world_size)
        ]
        self.local_ranks = [
            rank for rank, machine in enumerate(machines) if machine == machines[state.rank]
        ]
        self._host = local_address(master) if len(set(machines)) > 1 else "127.0.0.1"

    def write(self, key: str, value: str) -> None:
        """Let other ranks read a value."""
        self._store.set(key, value)

    def read(self, key: str, rank: int) -> str:
        """The value that `rank` has written. Raises `EngineFault` if it doesn't arrive."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        try:
            while not self._store.check([key]):
                self._check(deadline, rank)
                time.sleep(_POLL_S)
            return self._store.get(key).decode()
        except (RuntimeError, OSError) as error:
            raise EngineFault(f"The ranks' store has ended: {error}") from error

    def wait_for_all(self, what: str) -> None:
        """Wait until all ranks have come here. Raises `EngineFault` if one doesn't."""
        self.write(f"{what}/{self.state.rank}", "")
        for rank in range(self.state.world_size):
            self.read(f"{what}/{rank}", rank)

    def _check(self, deadline: float, rank: int) -> None:
        """Raise `EngineFault` where it's of no use to wait for `rank` any longer."""
        if reason := self._find_failure():
            raise EngineFault(reason)
        if time.monotonic() > deadline:
            raise EngineFault(f"Rank {rank} did not join within {JOIN_TIMEOUT_S:g} s.")

    def share_memory(self, num_bytes: int) -> RankMemory:
        """Memory that the ranks of this machine share; see `RankMemory.create`."""
        leader, rank = self.local_ranks[0], self.state.rank
        if rank == leader:
            memory = RankMemory.create(self.state, num_bytes)
            self.write(f"memory/{rank}", f"/proc/{os.getpid()}/fd/{memory.descriptor}")
            return memory
        path = self.read(f"memory/{leader}", leader)
        return RankMemory.open(os.open(path, os.O_RDWR | os.O_CLOEXEC), self.state)

    def connect(self, links: Collection[Link] = ()) -> dict[tuple[int, str], int]:
        """Open this rank's ends of `stage_links`, of `tensor_links` and of `links`; descriptors by
        the rank on the other side, and kind.

        Raises `EngineFault` for a rank that doesn't connect.
        """
        state = self.state
        links = [*stage_links(state), *tensor_links(state, self._machines), *links]
        rank, token = self.state.rank, self.read("token", 0).encode()
        expected = {(link.source, link.kind) for link in links if link.target == rank}
        descriptors: dict[tuple[int, str], int] = {}
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.create_server((self._host, 0), family=family, backlog=256) as server:
            server.settimeout(_POLL_S)
            deadline = time.monotonic() + JOIN_TIMEOUT_S
            if expected:
                self.write(f"address/{rank}", f"{self._host} {server.getsockname()[1]}")
            try:
                for link in links:
                    if link.source == rank:
                        host, port = self.read(f"address/{link.target}", link.target).split()
                        connection = socket.create_connection((host, int(port)), JOIN_TIMEOUT_S)
                        connection.sendall(_HELLO.pack(token, rank, link.kind.encode()))
                        descriptors[link.target, link.kind] = _detach(connection)
                while expected:
                    try:
                        connection = server.accept()[0]
                    except TimeoutError:
                        self._check(deadline, min(expected)[0])
                        continue
                    peer = _read_hello(connection, token)
                    if peer in expected:
                        expected.remove(peer)
                        descriptors[peer] = _detach(connection)
                    else:
                        connection.close()
            except OSError as error:
                raise EngineFault(f"Rank {rank} can't connect to others: {error}") from error
        return descriptors


def _detach(connection: socket.socket) -> int:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection.detach()


def _read_hello(connection: socket.socket, token: bytes) -> tuple[int, str] | None:
    """The rank on the other side, and the kind of its messages; None: it's no member."""
    connection.settimeout(_HELLO_TIMEOUT_S)
    data = b""
    with suppress(OSError):
        while len(data) < _HELLO.size and (part := connection.recv(_HELLO.size - len(data))):
            data += part
    if len(data) < _HELLO.size:
        return None
    sent, rank, kind = _HELLO.unpack(data)
    return (rank, kind.rstrip(b"\0").decode()) if secrets.compare_digest(sent, token) else None
