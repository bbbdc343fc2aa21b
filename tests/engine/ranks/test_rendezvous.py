"""Ranks that were started apart find each other."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from engine.contract.errors import EngineFault
from engine.distributed import rendezvous
from engine.distributed.parallel_state import ParallelState
from engine.distributed.rendezvous import Rendezvous, local_address, stage_sockets, tensor_links


def meet(store: dist.Store, num_ranks: int) -> list[Any]:
    """Ranks in threads, and each one's memory and connections between stages."""

    def join(rank: int) -> Any:
        meeting = Rendezvous(store, ParallelState(rank, 1, num_ranks), "127.0.0.1")
        return meeting, meeting.share_memory(4096), meeting.connect()

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(join, range(num_ranks)))


def test_ranks_share_memory_and_connect_stages() -> None:
    ranks = meet(dist.HashStore(), 3)
    ranks[2][1].beat()
    assert [memory.num_beats(2) for _, memory, _ in ranks] == [1, 1, 1]
    sockets = [stage_sockets(meeting.state, ends) for meeting, _, ends in ranks]
    assert [ends.previous is None for ends in sockets] == [True, False, False]
    assert [ends.next is None for ends in sockets] == [False, False, True]
    assert [len(ends.logits) for ends in sockets] == [1, 1, 2]
    first, last = socket.socket(fileno=sockets[0].logits[0]), sockets[2].logits[0]
    with first, socket.socket(fileno=last) as replacement:
        first.sendall(b"logits")
        assert replacement.recv(6) == b"logits"


def test_ranks_of_a_stage_connect_where_they_are_on_several_machines() -> None:
    state = ParallelState(0, 2, 2)
    assert tensor_links(state, ["a", "a", "b", "b"]) == []
    assert tensor_links(state, ["a", "a", "b", "c"]) == [(3, 2, "tensors")]
    three = tensor_links(ParallelState(0, 3), ["a", "b", "b"])
    assert three == [(1, 0, "tensors"), (2, 0, "tensors"), (2, 1, "tensors")]


def test_a_stranger_is_no_rank() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        ranks = [
            threads.submit(Rendezvous, store, ParallelState(rank, 1, 2), "127.0.0.1")
            for rank in (0, 1)
        ]
        server = threads.submit(ranks[1].result().connect)
        host, port = store.get("address/1").decode().split()
        strangers = [socket.create_connection((host, int(port))) for _ in range(2)]
        strangers[0].sendall(rendezvous._HELLO.pack(b"0" * 16, 0, b"stage"))
        strangers[1].shutdown(socket.SHUT_WR)
        ranks[0].result().connect()
        assert set(server.result()) == {(0, "stage"), (0, "logits")}
        assert all(stranger.recv(1) == b"" for stranger in strangers)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_TIMEOUT_S", 0.2)
    with pytest.raises(EngineFault, match=r"Rank 1 did not join within 0\.2 s"):
        Rendezvous(dist.HashStore(), ParallelState(0, 2), "127.0.0.1")


def test_the_address_is_the_one_that_others_see() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"
