"""A response's head and what follows it leave together, in order, and nothing stays behind."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

from config.joined_writes import JoinedWrites, JoinedWritesProtocol
from inference.web.responses import LastChunk

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Transport:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("closed")

    def set_protocol(self, protocol: object) -> None:
        self.done.append(protocol)

    def is_closing(self) -> bool:
        return "closed" in self.done


async def test_a_head_waits_for_its_body_and_other_bytes_for_nothing() -> None:
    under = Transport()
    joined = JoinedWrites(under)  # type: ignore[arg-type]
    joined.write(HEAD)
    assert under.done == []
    joined.write(b"ok")
    joined.write(b"more")
    await asyncio.sleep(0)
    assert under.done == [HEAD + b"ok", b"more"]


async def test_a_head_alone_leaves_with_the_loops_next_turn() -> None:
    under = Transport()
    joined = JoinedWrites(under)  # type: ignore[arg-type]
    joined.write(HEAD)
    await asyncio.sleep(0)
    assert under.done == [HEAD]


async def test_closing_and_handing_over_leave_nothing_behind() -> None:
    for end in ("close", "hand over"):
        under = Transport()
        joined = JoinedWrites(under)  # type: ignore[arg-type]
        joined.write(HEAD)
        if end == "close":
            joined.close()
            assert joined.is_closing()
        else:
            joined.set_protocol(asyncio.Protocol())
        assert under.done[0] == HEAD
        await asyncio.sleep(0)
        assert len(under.done) == 2


async def application(scope: Any, receive: Any, send: Any) -> None:
    """A stream of three chunks whose last one ends the response."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for chunk in (b"one", b"two", LastChunk(b"three")):
        more = not isinstance(chunk, LastChunk)
        await send({"type": "http.response.body", "body": chunk, "more_body": more})


async def test_uvicorn_serves_on_it_and_the_connection_is_kept() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, http=JoinedWritesProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    for _ in range(2):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert (
            await reader.readuntil(b"0\r\n\r\n")
            == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"
        )
    writer.close()
    server.should_exit = True
    await serving
