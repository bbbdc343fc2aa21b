"""A request that offers another protocol is answered in HTTP/1.1, with its body."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from config.connection_limits import LimitedHttpProtocol

#: As Java's HttpClient sends them with a first request.
OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nHost: x\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    b"Upgrade: h2c\r\n"
)
LENGTH = b"POST /a HTTP/1.1\r\n%sContent-Length: 11\r\n\r\n" % OFFER + b'{"n": "\r\n"}'
CHUNKS = (
    b"POST /b HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n" % OFFER
    + b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"
)
NO_BODY = b"GET /c HTTP/1.1\r\n%s\r\n" % OFFER
WITHOUT_OFFER = b"POST /d HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nlast"
EXPECTED = [
    ["POST", "/a", '{"n": "\r\n"}'],
    ["POST", "/b", "abcde"],
    ["GET", "/c", ""],
    ["POST", "/d", "last"],
]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers with a line of JSON: method, path and body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    line = json.dumps([scope["method"], scope["path"], body.decode()]).encode() + b"\n"
    length = (b"content-length", b"%d" % len(line))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": line})


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, http=LimitedHttpProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    yield listener.getsockname()
    server.should_exit = True
    await serving


@pytest.mark.parametrize("size", [1, 7, 150, 10_000])
async def test_requests_that_offer_http_2_keep_their_bodies_however_they_are_cut(
    address: tuple[str, int], size: int
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    data = LENGTH + CHUNKS + NO_BODY + LENGTH + WITHOUT_OFFER
    for start in range(0, len(data), size):
        writer.write(data[start : start + size])
        await writer.drain()
        await asyncio.sleep(0)
    answers = []
    for _ in range(5):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 200")
        answers.append(json.loads(await reader.readline()))
    assert answers == [*EXPECTED[:3], EXPECTED[0], EXPECTED[3]]
    writer.close()
