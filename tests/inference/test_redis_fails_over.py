"""A fail-over of Redis under streams: they pause, and end as without it; the ledger too."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import pytest

from chaos import failover
from config.connections import socket_path
from tests.inference import live
from tests.inference.test_gateway_death import Client, client_of, ledger, read, until

STREAMS, OUTPUT = 4, 200


def greedy(number: int) -> Client:
    client = client_of(number)
    client.body["temperature"] = 0
    return client


def replica_command(of: live.Instance) -> list[str]:
    model = str(live.ROOT / "demo" / "model")
    flags = ["--replica-id", "r", "--redis-url", of.redis_url, "--model", model]
    return [sys.executable, "-m", "engine.serving", *flags, "--served-model-name", "m"]


@pytest.mark.system
@pytest.mark.timeout(300)
async def test_streams_and_ledger_are_whole_through_a_fail_over_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "OTHER_S", 1.0)
    monkeypatch.setattr("tests.inference.test_gateway_death.OUTPUT", OUTPUT)
    with (
        live.instance(tmp_path) as of,
        live.process(replica_command(of), of.environment),
        live.gateway(of, "uvicorn") as (port, _),
    ):
        asked: list[Client] = []
        exceeding_event = asyncio.Event()
        async with httpx.AsyncClient(timeout=120) as http:
            calm = [greedy(number) for number in range(STREAMS)]
            await asyncio.gather(*(read(http, of, port, client) for client in calm))

            async def ask_again(number: int) -> None:
                while not exceeding_event.is_set():
                    asked.append(greedy(number))
                    await read(http, of, port, asked[-1])

            asking = asyncio.gather(*map(ask_again, range(STREAMS)))
            await until(lambda: asked and asked[-1].text)
            await failover.fail_over_and_back(socket_path(tmp_path / "redis"))
            exceeding_event.set()
            await asking
        texts = {json.dumps(client.body): client.text for client in calm}
        rows = ledger(of)
        for client in [*calm, *asked]:
            assert client.finished
            assert client.text == texts[json.dumps(client.body)]
            assert client.usage["completion_tokens"] == OUTPUT
            assert rows[client.stream] == (client.usage["prompt_tokens"], OUTPUT)
        assert len(rows) == len(calm) + len(asked)
