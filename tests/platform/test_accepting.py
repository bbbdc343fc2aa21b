"""Many clients that connect at once don't keep others from being taken in."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack

import uvloop

from config.serve import BACKLOG, MAX_ACCEPTS_PER_TICK, listeners

TURNS = 4


def test_who_connects_behind_many_is_taken_in_within_a_few_turns_of_the_loop() -> None:
    turns, used_at = 0, []

    class CountingProtocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            used_at.append(turns)

    async def accept(listener: socket.socket, count: int) -> None:
        nonlocal turns
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(CountingProtocol, sock=sock) for sock in listeners(listener)
        ]
        while len(used_at) < count:
            turns += 1
            await asyncio.sleep(0)
        for server in servers:
            server.close()

    count = TURNS * MAX_ACCEPTS_PER_TICK
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener, ExitStack() as opened:
        for _ in range(count):
            opened.enter_context(socket.create_connection(listener.getsockname()))
        uvloop.run(accept(listener, count))
    assert used_at[-1] - used_at[0] <= TURNS


def test_a_gateway_that_begins_leaves_the_others_sockets_as_they_are() -> None:
    with socket.create_server(("127.0.0.1", 0)) as shared, ExitStack() as opened:
        inherited = [socket.socket(fileno=os.dup(shared.fileno())) for _ in range(2)]
        for listener in inherited:
            for copy in listeners(listener):
                opened.enter_context(copy)
            assert not os.get_blocking(shared.fileno())
