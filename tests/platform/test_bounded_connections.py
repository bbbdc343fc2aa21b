"""FAULTS 52: strangers' connections are bounded in number and in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from config import connection_limits as bounded_connections
from config.connection_limits import LimitedHttpProtocol


async def application(scope: Any, receive: Any, send: Any) -> None:
    """An empty answer."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    """Where a uvicorn with the protocol listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, http=LimitedHttpProtocol, lifespan="off", log_config=None)
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
    retained_connections = [await asyncio.open_connection(*address) for _ in range(2)]
    for reader, writer in retained_connections:
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
    retained_connections[0][1].close()
    retained_connections[1][1].write(REQUEST)
    assert (await retained_connections[1][0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
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
    answered = await asyncio.wait_for(reader.read(), 60)
    assert answered.count(b"HTTP/1.1") == sent.count(REQUEST)
    writer.close()


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"


@pytest.mark.parametrize(
    "begin",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Endless: ",
        REQUEST + b"GET / HTTP/1.1\r\nX-Endless: ",
        CHUNKED + b"0\r\nX-Endless: ",
        CHUNKED + b"1;",
    ],
)
async def test_fault_52_a_head_that_never_ends_is_refused(
    address: tuple[str, int], begin: bytes
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(begin)
    with contextlib.suppress(ConnectionError):
        for _ in range(1000):
            writer.write(b"a" * 16_384)
            await writer.drain()
            await asyncio.sleep(0)
        pytest.fail("it was read for ever")
    with contextlib.suppress(ConnectionError):
        answer = await reader.read()
        if begin.startswith(b"GET / HTTP/1.1\r\nHost: x\r\nX"):
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 431")
            assert f"content-length: {len(body)}".encode() in head
            assert json.loads(body)["error"]["code"] == "headers_too_large"


async def test_fault_52_too_many_headers_are_refused_before_anything_is_made_of_them(
    address: tuple[str, int],
) -> None:
    for count, status in ((255, b"204"), (256, b"431"), (1400, b"431")):
        reader, writer = await asyncio.open_connection(*address)
        more = b"".join(b"x-%d: y\r\n" % number for number in range(count))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n")
        head, _, body = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status), count
        if status == b"431":
            body += await reader.read()
            assert json.loads(body)["error"]["code"] == "too_many_headers"
            assert f"content-length: {len(body)}".encode() in head
        writer.close()


async def test_a_long_head_and_a_long_body_pass(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    for _ in range(3):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 40_000)
        writer.write(b"\r\nContent-Length: 1000000\r\n\r\n" + b"b" * 1_000_000)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
    writer.close()
