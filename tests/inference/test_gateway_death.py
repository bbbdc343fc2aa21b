"""A gateway ends under its streams; another one goes on with them, billed once."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import redis
from websockets.asyncio.client import connect

from config.uvicorn_server import CLOSE_REASON
from engine.contract.redis_keys import KEY_PREFIX
from tests.inference import live
from tests.inference.conftest import until
from tests.waiting import wait_until

pytestmark = pytest.mark.system

STREAMS, LOST, OUTPUT = 16, 4, 60


@dataclass
class Client:
    """One client: what it asks, and what it has."""

    body: dict[str, Any]
    path: str
    text: str = ""
    last_id: str = ""
    stream: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    finished: bool = False
    error: str = ""

    def read(self, line: str) -> None:
        if line.startswith("id: "):
            self.last_id = line.removeprefix("id: ")
            self.stream = self.last_id.partition(":")[0]
        if line == "data: [DONE]":
            self.finished = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.error = event["error"]["code"]
                return
            for choice in event["choices"]:
                self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.usage = event.get("usage") or self.usage


def client_of(number: int) -> Client:
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if number % 2:
        return Client(body | {"prompt": f"{number:04} tell"}, "/v1/completions")
    messages = [{"role": "user", "content": f"{number:04} tell"}]
    return Client(body | {"messages": messages}, "/v1/chat/completions")


async def read(http: httpx.AsyncClient, of: live.Instance, port: int, client: Client) -> None:
    """Read to the end, or until the gateway is gone."""
    headers = {"authorization": f"Bearer {of.key}"}
    if client.last_id:
        headers["last-event-id"] = client.last_id
    url = f"http://127.0.0.1:{port}{client.path}"
    try:
        async with http.stream("POST", url, json=client.body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                client.read(line)
    except httpx.HTTPError:
        assert not client.finished


async def course(
    of: live.Instance, ports: tuple[int, int], first: Any
) -> tuple[list[Client], list[Client]]:
    """(as it is without a fault, with one)."""
    async with httpx.AsyncClient(timeout=120) as http:
        calm, clients = ([client_of(number) for number in range(STREAMS)] for _ in range(2))
        undisturbed = asyncio.gather(*(read(http, of, ports[1], client) for client in calm))
        reading = asyncio.gather(*(read(http, of, ports[0], client) for client in clients))
        await until(lambda: all(len(client.text) > 5 for client in clients))
        first.kill()
        await reading
        resumed = clients[LOST:]
        await asyncio.gather(*(read(http, of, ports[1], client) for client in resumed))
        await undisturbed
    return calm, clients


def manage(of: live.Instance, *words: str) -> str:
    command = [sys.executable, "manage.py", *words]
    return subprocess.run(
        command, cwd=live.ROOT, env=of.environment, check=True, capture_output=True, text=True
    ).stdout


def ledger(of: live.Instance) -> dict[str, tuple[int, int]]:
    """Request id -> prompt and output tokens, once nothing is open any more."""
    with redis.Redis.from_url(of.redis_url) as client:
        wait_until(
            lambda: not any(client.hlen(name) for name in client.keys(f"{KEY_PREFIX}:open:*")),
            timeout_s=120,
        )
    manage(of, "drain_usage", "--claim-after", "0")
    with sqlite3.connect(Path(of.environment["QUIRE_DATA_DIR"]) / "quire.sqlite3") as database:
        rows = database.execute(
            "SELECT request_id, prompt_tokens, completion_tokens FROM metering_usageentry"
        )
        return {row[0]: row[1:] for row in rows}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[live.Instance, int]]:
    """An instance with a replica, and the port of the gateway that stays."""
    flags = ("--token-delay", "0.05", "--vocab-size", "512", "--low", "10", "--high", "90")
    with (
        TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        live.instance(Path(folder)) as of,
        live.replica(of, "tests.fakes.fake_replica", *flags),
        live.gateway(of, "uvicorn") as (port, _),
    ):
        yield of, port


def test_fault_49_a_killed_gateways_streams_go_on_at_another_and_are_billed_right(
    served: tuple[live.Instance, int],
) -> None:
    of, port_b = served
    with live.gateway(of, "uvicorn") as (port_a, first):
        calm, clients = asyncio.run(course(of, (port_a, port_b), first))
        rows = ledger(of)
        # Exits with 1 unless the ledger is what the engine wrote.
        assert "They agree." in manage(of, "reconcile_usage")
    # Nothing is lost or doubled.
    for one, other in zip(calm[LOST:], clients[LOST:], strict=True):
        assert (other.text, other.usage, other.finished) == (one.text, one.usage, True)
        # One row a stream, by whoever settled last.
        assert rows[other.stream] == (one.usage["prompt_tokens"], OUTPUT)
    # Who can't go on is billed with what came: each token is a character here.
    for one, other in zip(calm[:LOST], clients[:LOST], strict=True):
        prompt, output = rows[other.stream]
        assert prompt == one.usage["prompt_tokens"]
        assert len(other.text) <= output <= OUTPUT
    for client in (*calm, *clients):
        assert [name for name in rows if name.startswith(client.stream)] == [client.stream]
    assert all(re.fullmatch(r"[a-z]+-[0-9a-f]{32}", name) for name in rows)


async def interrupted(
    of: live.Instance, ports: tuple[int, int], ending: subprocess.Popen[bytes]
) -> tuple[list[Client], list[Client]]:
    """(as it is at the second gateway, with the first one's end); unstreamed answers and sockets of
    the first one end with the same error.
    """
    headers = {"authorization": f"Bearer {of.key}"}
    async with (
        httpx.AsyncClient(timeout=120, headers=headers) as http,
        connect(f"ws://127.0.0.1:{ports[0]}/v1/realtime", additional_headers=headers) as socket,
    ):
        calm, clients = ([client_of(number) for number in range(4)] for _ in range(2))
        undisturbed = asyncio.gather(*(read(http, of, ports[1], client) for client in calm))
        reading = asyncio.gather(*(read(http, of, ports[0], client) for client in clients))
        unstreamed = {"model": "m", "prompt": "all at once", "max_tokens": OUTPUT}
        url = f"http://127.0.0.1:{ports[0]}/v1/completions"
        waiting = asyncio.create_task(http.post(url, json=unstreamed | {"ignore_eos": True}))
        await until(lambda: all(len(client.text) > 5 for client in clients))
        ending.terminate()
        await reading
        assert [client.error for client in clients] == ["gateway_shutting_down"] * len(clients)
        refused = await waiting
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "gateway_shutting_down"
        await socket.wait_closed()
        assert (socket.close_code, socket.close_reason) == (1012, CLOSE_REASON)
        await asyncio.gather(*(read(http, of, ports[1], client) for client in clients))
        await undisturbed
    return calm, clients


def test_streams_that_outlast_a_gateways_grace_end_with_an_error_and_go_on_at_another(
    served: tuple[live.Instance, int],
) -> None:
    of, port_b = served
    with live.gateway(of, "uvicorn", grace=0) as (port_a, first):
        calm, clients = asyncio.run(interrupted(of, (port_a, port_b), first))
        first.wait(60)
        rows = ledger(of)
    for one, other in zip(calm, clients, strict=True):
        assert (other.text, other.usage, other.finished) == (one.text, one.usage, True)
        # The first gateway settles what it has sent, or the second one does all of it.
        parts = [count for name, count in rows.items() if name.startswith(other.stream)]
        assert [sum(counts) for counts in zip(*parts, strict=True)] == [
            one.usage["prompt_tokens"],
            OUTPUT,
        ]
