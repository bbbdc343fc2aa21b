"""Two replicas and two gateways, as a user starts them: killed, exchanged, and nobody notices.

`QUIRE_TEST_KILLS=20 QUIRE_TEST_STREAMS=32 QUIRE_TEST_MAX_TOKENS=600` with `--timeout 900` is the
long form of the first test; `QUIRE_TEST_SEED` chooses other moments. (A request that 30 replicas
were given is ended, so more kills belong in several runs.)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.kills import KINDS, Answer, Killer, ask, bodies, heartbeats, stop_within, until
from tests.e2e.product import Product, running
from tests.e2e.test_survival import wait_for

KILLS = int(os.environ.get("QUIRE_TEST_KILLS", "3"))
STREAMS = int(os.environ.get("QUIRE_TEST_STREAMS", str(2 * len(KINDS))))
MAX_TOKENS = int(os.environ.get("QUIRE_TEST_MAX_TOKENS", "150"))
SEED = int(os.environ.get("QUIRE_TEST_SEED", "1"))

#: What the admin's form does.
NEW_SETTINGS = """
from catalog import actions
from catalog.models import ServedModel
from tenants.actors import COMMAND_LINE
model = ServedModel.objects.get()
settings = {**model.settings, "max_num_seqs": 48}
actions.update_model(actor=COMMAND_LINE, model=model, settings=settings)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """`manage.py up --replicas 2 --workers 2`, and what finds reasoning; else by default."""
    flags = ("--replicas", "2", "--workers", "2", "--reasoning-parser", "qwen3")
    with running(tmp_path_factory.mktemp("pair"), *flags) as found:
        wait_for(lambda: [b.state for b in heartbeats(found)] == ["ready"] * 2)
        yield found


async def asked(
    pair: Product, requests: list[dict[str, Any]], killer: Killer | None = None
) -> list[Answer]:
    """All streams at once."""
    limits = httpx.Limits(max_connections=2 * STREAMS)
    on_chunk = killer.chunk if killer else lambda: None
    async with httpx.AsyncClient(limits=limits, timeout=300) as client:
        streams = [ask(client, pair, body, on_chunk) for body in requests]
        if killer is None:
            return list(await asyncio.gather(*streams))
        killing = asyncio.create_task(killer.run())
        answers = list(await asyncio.gather(*streams))
        killing.cancel()
        return answers


async def undisturbed(pair: Product) -> tuple[list[dict[str, Any]], list[Answer]]:
    """Requests, and their answers when nobody is killed; those of the kind "stop" end at a piece
    of what they'd have said.
    """
    requests = bodies(pair, STREAMS, MAX_TOKENS)
    answers = await asked(pair, requests)
    stops = [number for number, body in enumerate(requests) if "stop" in body]
    for number in stops:
        requests[number]["stop"] = ["zqx zqx", stop_within(answers[number].choices[0].text)]
    again = await asked(pair, [requests[number] for number in stops])
    for number, answer in zip(stops, again, strict=True):
        assert answer.choices[0].finish_reason == "stop"
        answers[number] = answer
    return requests, answers


async def test_fault_27_streams_of_every_kind_are_the_same_through_kills(pair: Product) -> None:
    requests, calm = await undisturbed(pair)
    killer = Killer(pair, KILLS, chunks=STREAMS * MAX_TOKENS // 2, seed=SEED)
    through = await asked(pair, requests, killer)
    print(f"{killer.killed.total()} kills, {STREAMS} streams of up to {MAX_TOKENS} tokens")
    assert killer.killed.total() >= 1
    kinds = list(KINDS)
    changed = [
        (number, kinds[number % len(kinds)])
        for number, (one, other) in enumerate(zip(calm, through, strict=True))
        if one.same != other.same
    ]
    assert changed == []
    assert [answer.id for answer in through if len(answer.cached) != 1] == []
    assert {answer.usage["completion_tokens"] > 0 for answer in through} == {True}
    thoughts = [answer.choices[0].reasoning for answer in through if answer.choices[0].reasoning]
    assert len(thoughts) == sum("thinking_token_budget" in body for body in requests)


async def test_new_settings_reach_every_replica_without_a_failed_request(pair: Product) -> None:
    wait_for(lambda: [b.state for b in heartbeats(pair)] == ["ready"] * 2)
    before = {beat.incarnation for beat in heartbeats(pair)}
    replaced = asyncio.Event()
    failed: list[str] = []
    served = 0

    async def reader(client: httpx.AsyncClient, body: dict[str, object]) -> None:
        nonlocal served
        while not replaced.is_set():
            answer = await ask(client, pair, body)
            served += 1
            if not answer.ended or any(c.finish_reason is None for c in answer.choices.values()):
                failed.append(answer.id)

    def all_new() -> bool:
        beats = heartbeats(pair)
        new = [b for b in beats if b.state == "ready" and b.incarnation not in before]
        return len(new) == len(beats) == 2

    async def change() -> None:
        await asyncio.to_thread(pair.manage, "shell", "-c", NEW_SETTINGS)
        await until(all_new)
        replaced.set()

    async with httpx.AsyncClient(timeout=120) as client:
        readers = [reader(client, body) for body in bodies(pair, 4, 40)]
        await asyncio.wait_for(asyncio.gather(change(), *readers), 180)
    assert served > 4
    assert failed == []
