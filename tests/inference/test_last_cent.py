"""Two gateways race for the last cent, while one is killed and Redis is restarted."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from config import embedded_redis
from engine.contract.redis_keys import KEY_PREFIX
from tests.inference import live

pytestmark = pytest.mark.system

REQUESTS = 100
#: In nanos: about two thirds of what all requests want.
BUDGET = 6_000_000
OUTPUT = 40
#: A million tokens cost so many units, so a prompt token costs 1,000 nanos, an output token 2,000.
PRICE_AND_BUDGET = f"""
from metering import actions
from tenants.actors import CLI_ACTOR
from tenants.models import Tenant
actions.set_price(
    actor=CLI_ACTOR, model="m", input_per_million="1", output_per_million="2"
)
actions.set_budget(
    actor=CLI_ACTOR, tenant=Tenant.objects.get(slug="live"), period="month",
    amount="{BUDGET / 1e9:.9f}",
)
"""


@dataclass
class Receipt:
    """What one client got: its answer's id, tokens that came and the usage when it ended."""

    status: int = 0
    request_id: str = ""
    chunks: int = 0
    usage: dict[str, int] = field(default_factory=dict)
    killed: bool = False


@dataclass
class Course:
    """How far the race has come."""

    chunks: int = 0
    finished: int = 0

    async def until(self, what: str, count: int) -> None:
        """Wait until there are so many."""
        async with asyncio.timeout(300):
            for _ in itertools.count():
                if getattr(self, what) >= count:
                    return
                await asyncio.sleep(0.02)


@pytest.fixture
def redis_of(short_tmp: Path) -> Iterator[dict[str, Any]]:
    """A Redis with persistence that can be killed and started again in its place."""
    folder = short_tmp / "cent"
    process, url = embedded_redis.start(folder, persist=True)
    redis_server = {"process": process, "url": url, "folder": folder}
    yield redis_server
    redis_server["process"].stop(grace=5)


def restart(redis_server: dict[str, Any]) -> None:
    """SIGKILL, then anew on the same files."""
    os.kill(redis_server["process"].pid, signal.SIGKILL)
    while redis_server["process"].poll() is None:
        time.sleep(0.01)
    redis_server["process"], _ = embedded_redis.start(redis_server["folder"], persist=True)


async def ask(
    client: httpx.AsyncClient, port: int, key: str, number: int, course: Course
) -> Receipt:
    """One stream. A restart of Redis turns nobody away, so it's asked for once."""
    body = {
        "model": "m",
        "prompt": f"{number:04} tell",
        "max_tokens": OUTPUT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    reported_response = Receipt()
    headers = {"authorization": f"Bearer {key}"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    try:
        async with client.stream("POST", url, json=body, headers=headers) as response:
            reported_response.status = response.status_code
            if reported_response.status != 200:
                await response.aread()
                return reported_response
            async for line in response.aiter_lines():
                read_line(reported_response, line)
                course.chunks += 1
            course.finished += 1
    except httpx.HTTPError:
        reported_response.killed = True
    return reported_response


def read_line(request: Receipt, line: str) -> None:
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    request.request_id = event["id"]
    request.usage = event.get("usage") or request.usage
    request.chunks += sum(bool(choice["text"]) for choice in event["choices"])


def manage(of: live.Instance, *words: str) -> str:
    command = [sys.executable, "manage.py", *words]
    return subprocess.run(
        command, cwd=live.ROOT, env=of.environment, check=True, capture_output=True, text=True
    ).stdout


def counter(url: str) -> dict[str, int]:
    """The budget's counters in Redis."""
    client = redis.Redis.from_url(url)
    (name,) = client.keys(f"{KEY_PREFIX}:budget:*")
    names = ("tokens", "nanos", "held_tokens", "held_nanos")
    return {name: int(value) for name, value in zip(names, client.hmget(name, names), strict=True)}


def ledger(of: live.Instance) -> dict[str, tuple[int, int, int]]:
    """Request id -> prompt tokens, output tokens, nanos."""
    manage(of, "drain_usage", "--claim-after", "0")
    with sqlite3.connect(Path(of.environment["QUIRE_DATA_DIR"]) / "quire.sqlite3") as database:
        rows = database.execute(
            "SELECT request_id, prompt_tokens, completion_tokens, cost_nanos "
            "FROM metering_usageentry"
        )
        return {row[0]: row[1:] for row in rows}


async def race(
    of: live.Instance, redis_server: dict[str, Any], ports: list[int], first: Any
) -> list[Receipt]:
    limits, course = httpx.Limits(max_connections=REQUESTS), Course()
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        asked = [
            asyncio.create_task(ask(client, ports[number % 2], of.key, number, course))
            for number in range(REQUESTS)
        ]
        await course.until("chunks", 3 * REQUESTS)
        restart(redis_server)  # here: a server ends with the thread that started it
        await course.until("chunks", 10 * REQUESTS)
        first.kill()
        return list(await asyncio.gather(*asked))


def test_fault_24_the_last_cent_is_spent_once_though_a_gateway_and_redis_are_killed(
    short_tmp: Path, redis_of: dict[str, Any]
) -> None:
    folder = short_tmp / "cent-instance"
    folder.mkdir()
    with live.instance(folder, redis_of["url"]) as of:
        flags = ("--token-delay", "0.03", "--vocab-size", "512", "--low", "10", "--high", "90")
        manage(of, "shell", "-c", PRICE_AND_BUDGET)
        with (
            live.replica(of, "tests.fakes.fake_replica", *flags),
            live.gateway(of, "uvicorn") as (port_a, first),
            live.gateway(of, "uvicorn") as (port_b, _),
        ):
            receipts = asyncio.run(race(of, redis_of, [port_a, port_b], first))
            deadline = time.monotonic() + 60
            while counter(redis_of["url"])["held_nanos"] and time.monotonic() < deadline:
                time.sleep(0.2)
            spent, rows = counter(redis_of["url"]), ledger(of)
            # Exits with 1 unless the ledger is what the engine wrote.
            assert "They agree." in manage(of, "reconcile_usage")
    # Overspend 0, nothing left held, and the ledger says what the counters say.
    assert spent["held_nanos"] == spent["held_tokens"] == 0
    assert spent["nanos"] <= BUDGET
    assert sum(nanos for _, _, nanos in rows.values()) == spent["nanos"]
    assert sum(prompt + output for prompt, output, _ in rows.values()) == spent["tokens"]
    # Each answer that ended is billed as its client was told.
    finished = [delta for delta in receipts if delta.usage]
    assert len(finished) > REQUESTS / 8
    for request in finished:
        prompt, output, _ = rows[request.request_id]
        assert (prompt, output) == (
            request.usage["prompt_tokens"],
            request.usage["completion_tokens"],
        )
    # Each that was cut off when its gateway died is billed with at least what had come.
    cut = [request for request in receipts if request.killed and request.request_id]
    for request in cut:
        assert rows[request.request_id][1] >= request.chunks
    # A restart of Redis turned nobody away, and nobody was refused while enough was left for a
    # prompt and one more token.
    assert {response.status for response in receipts} <= {0, 200, 429}
    refused = sum(response.status == 429 for response in receipts)
    prompt = max(prompt for prompt, _, _ in rows.values())
    if refused:
        assert BUDGET - spent["nanos"] < prompt * 1000 + 2000
