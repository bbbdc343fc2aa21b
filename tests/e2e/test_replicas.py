"""Two replicas and two gateways, as a user starts them: killed, exchanged, and nobody notices.

`QUIRE_TEST_KILLS=40 QUIRE_TEST_STREAMS=32` is the long form of the first test.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.kills import KINDS, Answer, Killer, ask, bodies, heartbeats, until
from tests.e2e.product import Product, running
from tests.e2e.test_survival import wait_for

KILLS = int(os.environ.get("QUIRE_TEST_KILLS", "3"))
STREAMS = int(os.environ.get("QUIRE_TEST_STREAMS", str(2 * len(KINDS))))
MAX_TOKENS = int(os.environ.get("QUIRE_TEST_MAX_TOKENS", "150"))

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
    """`manage.py up --replicas 2 --workers 2`, with default settings."""
    flags = ("--replicas", "2", "--workers", "2")
    with running(tmp_path_factory.mktemp("pair"), *flags) as found:
        wait_for(lambda: [b.state for b in heartbeats(found)] == ["ready"] * 2)
        yield found


async def asked(pair: Product, killer: Killer | None = None) -> list[Answer]:
    """All streams at once."""
    limits = httpx.Limits(max_connections=2 * STREAMS)
    on_chunk = killer.chunk if killer else lambda: None
    async with httpx.AsyncClient(limits=limits, timeout=300) as client:
        streams = [ask(client, pair, body, on_chunk) for body in bodies(pair, STREAMS, MAX_TOKENS)]
        if killer is None:
            return list(await asyncio.gather(*streams))
        killing = asyncio.create_task(killer.run())
        answers = list(await asyncio.gather(*streams))
        killing.cancel()
        return answers


async def test_fault_27_streams_of_every_kind_are_the_same_through_kills(pair: Product) -> None:
    calm = await asked(pair)
    killer = Killer(pair, KILLS, chunks=STREAMS * MAX_TOKENS // 2, seed=1)
    through = await asked(pair, killer)
    assert killer.killed.total() >= 1
    kinds = list(KINDS)
    changed = [
        (number, kinds[number % len(kinds)])
        for number, (one, other) in enumerate(zip(calm, through, strict=True))
        if one.same != other.same
    ]
    assert changed == []
    for one, other in zip(calm, through, strict=True):
        for index, choice in one.choices.items():
            found = other.choices[index].logprobs
            assert found == pytest.approx(choice.logprobs, abs=1e-3)
    assert {answer.usage["completion_tokens"] > 0 for answer in through} == {True}


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
