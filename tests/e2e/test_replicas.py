"""Two replicas and two gateways, as a user starts them: killed, exchanged, and nobody notices.

`manage.py chaos --kills 40 --seed N` is the long form of the first part.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

from config.chaos import faults
from config.chaos.answer import Answer
from config.chaos.client import Client, clients
from config.chaos.instance import Instance, running, until
from config.chaos.kills import STREAMED, Kills
from config.chaos.kinds import asked_of
from config.chaos.report import passed, summary
from tests.e2e.adapter_swaps import swapped_under_kills

KILLS, TOKENS = 3, 150


async def test_fault_27_streams_of_every_kind_are_the_same_through_kills(tmp_path: Path) -> None:
    """And new settings reach every replica without a failed request. Fault 59: an adapter is
    replaced, taken offline and unloaded meanwhile, and each answer is its digest's own."""
    log = tmp_path / "up.log"
    async with (
        running(log) as instance,
        clients(instance.url, instance.api_key) as client,
    ):
        outcome = await Kills(KILLS, 2 * len(STREAMED), TOKENS, 1, print).run_on(instance, client)
        assert passed(outcome), summary(outcome)
        assert len(outcome.windows) == KILLS
        assert {asked.kind for asked in (r.asked for r in outcome.requests)} == set(STREAMED)
        await until(instance.whole, 60, "not whole again", log)
        swapped = await swapped_under_kills(instance, 2, 1)
        await until(instance.whole, 60, "not whole again", log)
        answers = await answers_while_settings_change(instance, client)
    assert swapped.wrong() == []
    assert len({digest for digest, _ in swapped.expected}) == 2
    assert {digest for digest, *_ in swapped.answers} == {digest for digest, _ in swapped.expected}
    assert len(swapped.answers) > 12
    assert swapped.kills == 2
    assert set(swapped.refused) <= {(404, "model_not_found")}
    assert len(answers) > 4
    assert [a.lost for a in answers if not a.ended or a.breaks or a.refusals] == []


async def answers_while_settings_change(instance: Instance, client: Client) -> list[Answer]:
    rolling = asyncio.create_task(faults.roll(instance, random.Random(1)))
    answers: list[Answer] = []

    async def reader(kind: str) -> None:
        for number in itertools.count():
            answers.append(await client.ask(asked_of(kind, number % 2, instance.model, 40)))
            if rolling.done():
                return

    await asyncio.gather(rolling, *(reader(kind) for kind in STREAMED[:4]))
    return answers
