"""The end of a gateway's server: what open streams and sockets still get."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from config import uvicorn_server
from config.uvicorn_server import CLOSE_REASON, GatewayServer, GatewayWebSocketProtocol
from engine.text.tokenizer import Tokenizer
from inference.api.audio import realtime
from inference.api.audio.realtime import RealtimeConsumer
from tests.inference.conftest import Gateway, until
from tests.inference.scripted import byte_by_byte
from tests.inference.test_playground_socket import APP, generate, headers, session_key

__all__ = ["session_key"]


@pytest.fixture(autouse=True)
def _time_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer than the product has."""
    monkeypatch.setattr(uvicorn_server, "SETTLE_S", 120)


@asynccontextmanager
async def served(application: Any, grace: float) -> AsyncIterator[tuple[GatewayServer, str]]:
    """A gateway's server of an application, and its address without a scheme."""
    config = uvicorn.Config(
        application, ws=GatewayWebSocketProtocol, lifespan="off", log_config=None
    )
    server = GatewayServer(config, grace)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield server, f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def frames_to_the_end(client: ClientConnection) -> list[dict[str, Any]]:
    """All frames until the server closes, which it must do as one that ends."""
    frames = []
    async with asyncio.timeout(60):
        try:
            while True:
                frames.append(json.loads(await client.recv()))
        except ConnectionClosed:
            assert (client.close_code, client.close_reason) == (1012, CLOSE_REASON)
    return frames


def page(address: str, session: str) -> connect:
    names = {name.decode(): value.decode() for name, value in headers(session, host=address)}
    names["origin"] = f"http://{names.pop('host')}"
    return connect(f"ws://{address}/ws/playground/", additional_headers=names)


async def test_a_server_that_was_starved_at_its_graces_end_sends_streams_their_last_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = asyncio.Event()
    client = SimpleNamespace(fail_all=failed.set)
    monkeypatch.setattr(uvicorn_server, "get_engine_client", lambda: client)

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        await failed.wait()
        for _ in range(20):  # from an answer's mailbox to its socket
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"last"})

    async with served(stream, grace=0.3) as (server, address), httpx.AsyncClient() as http:
        text = ""
        async with http.stream("GET", f"http://{address}/", timeout=60) as response:
            async for part in response.aiter_text():
                text += part
                if text == "first ":
                    server.should_exit = True
                    # Of main_loop and shutdown 0.2 s pass before the grace begins.
                    asyncio.get_running_loop().call_later(0.35, time.sleep, 1.5)
        assert text == "first last"


async def test_a_playgrounds_socket_lives_until_its_answer_is_complete(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str
) -> None:
    text = "and so on " * 10
    replica = gateway.scripted(byte_by_byte(tokenizer, text))
    replica.token_delay = 0.01
    async with (
        gateway.serving(replica),
        served(APP, grace=60) as (server, address),
        page(address, session_key) as idle,
        page(address, session_key) as busy,
    ):
        await idle.send('{"type": "ping"}')
        await idle.recv()
        await busy.send(json.dumps(generate()))
        await busy.recv()
        server.should_exit = True
        assert await frames_to_the_end(idle) == []
        *deltas, done = await frames_to_the_end(busy)
    assert "".join(frame.get("text", "") for frame in deltas) == text
    assert done["type"] == "done"


async def test_a_playgrounds_answer_that_outlasts_the_grace_ends_with_an_error(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str
) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, "and so on " * 10))
    replica.token_delay = 1.0
    async with (
        gateway.serving(replica),
        served(APP, grace=0.2) as (server, address),
        page(address, session_key) as client,
    ):
        await client.send(json.dumps(generate()))
        await client.recv()
        server.should_exit = True
        frames = await frames_to_the_end(client)
    assert frames[-1]["error"]["code"] == "gateway_shutting_down"


@pytest.mark.django_db(transaction=True)  # Channels closes old connections, which others may leave
async def test_a_realtime_socket_lives_until_its_turns_are_transcribed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = asyncio.Event()

    async def nothing(*arguments: Any) -> Any:
        return SimpleNamespace(tenant="ada")

    async def transcribe(self: RealtimeConsumer, ctx: Any, turn: realtime.Turn) -> None:
        await may_end.wait()
        await self._send_event("transcribed")

    monkeypatch.setattr(RealtimeConsumer, "_authenticate", nothing)
    monkeypatch.setattr(RealtimeConsumer, "_transcribe", transcribe)
    monkeypatch.setattr(realtime, "check_still_valid", nothing)
    async with (
        served(RealtimeConsumer.as_asgi(), grace=60) as (server, address),
        connect(f"ws://{address}{realtime.PATH}") as client,
    ):
        audio = base64.b64encode(bytes(2 * 24_000)).decode()
        await client.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        await client.send('{"type": "input_audio_buffer.commit"}')
        while json.loads(await client.recv())["type"] != "conversation.item.added":
            pass
        server.should_exit = True
        await until(lambda: not server.servers[0].is_serving())
        await (await client.ping())
        may_end.set()
        assert [frame["type"] for frame in await frames_to_the_end(client)] == ["transcribed"]
