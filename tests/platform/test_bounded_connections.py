"""FAULTS 52: strangers' connections are bounded in number and in time."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from config import bounded_connections
from config.bounded_connections import BoundedConnectionsProtocol


async def application(scope: Any, receive: Any, send: Any) -> None:
    """An empty answer."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    """Where a uvicorn with the protocol listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        application, http=BoundedConnectionsProtocol, lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    yield listener.getsockname()
    server.should_exit = True
    await serving


REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_fault_52_one_connection_too_many_is_told_so_and_closed(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_connections, "MAX_CONNECTIONS", 2)
    kept = [await asyncio.open_connection(*address) for _ in range(2)]
    for reader, writer in kept:
        writer.write(REQUEST)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
    reader, writer = await asyncio.open_connection(*address)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in head
    assert json.loads(body)["error"]["code"] == "overloaded"
    assert f"content-length: {len(body)}".encode() in head
    writer.close()
    # Those that were there go on, and a place that comes free is given.
    kept[0][1].close()
    kept[1][1].write(REQUEST)
    assert (await kept[1][0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
    for _ in range(100):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(REQUEST)
        if (await reader.readline()).startswith(b"HTTP/1.1 204"):
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("no place came free")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:", REQUEST + b"GET / HT"])
async def test_fault_52_a_connection_that_never_says_what_it_wants_is_closed(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(bounded_connections, "HEADERS_WITHIN_S", 0.1)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    answered = await asyncio.wait_for(reader.read(), 30)
    assert answered.count(b"HTTP/1.1") == sent.count(REQUEST)
    writer.close()
