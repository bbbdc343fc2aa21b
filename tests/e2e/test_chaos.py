"""Two replicas and two gateways, as a user starts them, and harmed in every way: nobody notices.

`manage.py chaos --minutes 10` and `--kills 40` are the long forms.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from chaos import faults, instance, run
from chaos.client import Client, clients
from chaos.instance import Instance, running, until
from chaos.kills import STREAMED, Kills, _victims
from chaos.report import passed, summary
from chaos.run import Faults, Request
from tests.e2e import drafting_replica, patient_settings
from tests.e2e.adapter_swaps import ANSWERS, swapped_under_kills
from tests.e2e.product import ROOT, clean_environment

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

KILLS, TOKENS = 2, 80
#: Workers and Redis are killed in test_worker.py and test_last_cent.py, too. The others have tests
#: of their own, and new settings come under streams with drafts.
HARM = [
    ("gateway frozen", "disk full"),
    pytest.param(("worker killed", "Redis killed"), marks=pytest.mark.slow),
]
#: Between two requests of a client: what is harmed needs the processor more.
REST_S = 2.0
ENVIRONMENT = instance.environment
#: Between two looks at whether a replica may be killed, or at how many drafts there were.
POLL_S = 0.2
#: How long streams with drafts go on behind the last kill.
AFTER_S = 2.0


@dataclass
class Harmed:
    """An instance, and what asks it."""

    instance: Instance
    client: Client

    async def wait_until_healthy(self) -> None:
        """All is as it was before the harm."""
        await until(self.instance.is_healthy, 60, "not whole again", self.instance.log)


def patient_environment(data_dir: Path, **more: str) -> dict[str, str]:
    """In the place of `instance.environment`: a request that had not begun when both replicas were
    killed waits until one is back, however long a busy machine loads. Replicas share few cores
    with all else here: a second thread of each would take them from a successor that loads.
    """
    patient = {
        "OMP_NUM_THREADS": "1",
        "DJANGO_SETTINGS_MODULE": patient_settings.__name__,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
    }
    return ENVIRONMENT(data_dir, **patient, **more)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harmed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harmed]:
    log = tmp_path_factory.mktemp("chaos") / "up.log"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(instance, "behind_relay", drafting_replica)
        patched.setattr(instance, "environment", patient_environment)
        async with running(log) as result, clients(result.url, result.api_key) as client:
            yield Harmed(result, client)


class SuspendedRequests:
    """Keeps clients from asking anew while no replica may be killed: what runs then goes on, and
    all come at once when the next one may. A processor that is full of streams only makes the
    killed one's successor late.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance, self._open = instance, asyncio.Event()
        self._fulfil = run._fulfil

    async def fulfil(self, client: Client, request: Request) -> None:
        """In the place of `run._fulfil`."""
        await self._open.wait()
        await self._fulfil(client, request)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """As long as the block lasts."""
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch())
            yield
            watch.cancel()

    async def _watch(self) -> None:
        while True:
            if await asyncio.to_thread(_victims, self._instance):
                self._open.set()
            else:
                self._open.clear()
            await asyncio.sleep(POLL_S)


async def test_fault_27_streams_of_every_kind_are_the_same_through_kills(
    harmed: Harmed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harmed.wait_until_healthy()
    suspended = SuspendedRequests(harmed.instance)
    monkeypatch.setattr(run, "_fulfil", suspended.fulfil)
    kills = Kills(KILLS, 2 * len(STREAMED), TOKENS, 1, print)
    async with suspended.watched():
        outcome = await kills.run_on(harmed.instance, harmed.client)
    assert passed(outcome), summary(outcome)
    assert len(outcome.windows) == KILLS
    assert {asked.kind for asked in (r.asked for r in outcome.requests)} == set(STREAMED)


def let_clients_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """For `REST_S` behind each answer."""
    fulfil = run._fulfil

    async def rested(client: Client, request: Request) -> None:
        await fulfil(client, request)
        await asyncio.sleep(REST_S)

    monkeypatch.setattr(run, "_fulfil", rested)


class Drafted(Kills):
    """Expects what is said without drafts. Before the first kill all replicas get drafts, which
    they keep.
    """

    drafts = num_accepted = 0

    async def _harm(self, instance: Instance, client: Client) -> None:
        await faults.change_settings(instance, {"speculative_config": faults.DRAFTS})
        await until(instance.is_healthy, 60, "not whole with drafts", instance.log)
        async with asyncio.TaskGroup() as group:
            count = group.create_task(self._count(instance))
            await super()._harm(instance, client)
            await asyncio.sleep(AFTER_S)
            count.cancel()

    async def _count(self, instance: Instance) -> None:
        """The most drafts that replicas told of at a time: a killed one's are gone."""
        while True:
            beats = await asyncio.to_thread(instance.heartbeats)
            stats = [beat.stats for beat in beats]
            drafts = sum(stat.spec_decode_num_draft_tokens_total for stat in stats)
            allocated_total = sum(stat.spec_decode_num_accepted_tokens_total for stat in stats)
            self.drafts, self.num_accepted = (
                max(self.drafts, drafts),
                max(self.num_accepted, allocated_total),
            )
            await asyncio.sleep(POLL_S)


async def test_with_drafts_and_kills_streams_of_every_kind_say_what_they_say_without(
    harmed: Harmed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New settings reach every replica. Requests begin at any moment and replicas are killed at
    any, other ones in each run.
    """
    await harmed.wait_until_healthy()
    let_clients_rest(monkeypatch)
    seed = random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}")
    drafted = Drafted(1, 2 * len(STREAMED), TOKENS, seed, print)
    outcome = await drafted.run_on(harmed.instance, harmed.client)
    assert passed(outcome), summary(outcome)
    assert {asked.kind for asked in (r.asked for r in outcome.requests)} == set(STREAMED)
    print(
        f"{len(outcome.requests)} streams, {drafted.num_accepted} of {drafted.drafts} drafts held"
    )
    assert 500 < drafted.num_accepted < drafted.drafts


async def test_an_adapter_that_is_exchanged_under_kills_never_answers_with_the_others_words(
    harmed: Harmed, tmp_path: Path
) -> None:
    """Fault 59: it's replaced, taken offline and unloaded, and each answer is its digest's own."""
    await harmed.wait_until_healthy()
    swapped = await swapped_under_kills(harmed.instance, 1, 1, tmp_path)
    assert swapped.mismatches() == []
    assert len({digest for digest, _ in swapped.expected}) == 2
    assert swapped.are_distinguishable()
    assert swapped.answered() == {digest for digest, _ in swapped.expected}
    assert len(swapped.answers) >= ANSWERS
    assert swapped.kills == 1
    assert set(swapped.refused) <= {(404, "model_not_found")}
    rows = "SELECT request_id, adapter_digest FROM metering_usageentry WHERE adapter <> ''"

    def billed() -> bool:
        matching_rows = harmed.instance.database.rows(rows)
        return set(swapped.ids) <= {
            (name.partition(".")[0], digest) for name, digest in matching_rows
        }

    await until(billed, 60, "the ledger has other digests", harmed.instance.log)


@pytest.mark.parametrize("harm", HARM, ids=["frozen-full", "killed"])
async def test_faults_of_every_process_hurt_nobody(
    harmed: Harmed, monkeypatch: pytest.MonkeyPatch, harm: tuple[str, ...]
) -> None:
    """Requests of every kind meanwhile."""

    def plan(seed: int, names: list[str]) -> Iterator[faults.Planned]:
        rng = random.Random(seed)
        for name in harm:
            if name in names:
                yield faults.Planned(name, rng.uniform(0.5, 1.5), random.Random(seed))

    monkeypatch.setattr(faults, "plan", plan)
    let_clients_rest(monkeypatch)
    monkeypatch.setattr(run, "VARIANTS", 1)
    monkeypatch.setattr(Faults, "max_tokens", 40)
    await harmed.wait_until_healthy()
    outcome = await Faults(10, 1, print, None, harm).run_on(harmed.instance, harmed.client)
    assert passed(outcome), summary(outcome)
    done = {window.fault for window in outcome.windows} | set(outcome.skipped)
    assert done == set(harm)
    assert "0 lost, 0 doubled, 0 changed." in summary(outcome)
    assert "Difference: 0." in summary(outcome)


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_a_minute_of_faults_hurts_nobody(tmp_path: Path) -> None:
    """The command."""
    program = [sys.executable, "manage.py", "chaos", "--minutes=1", "--seed=1"]
    child = await asyncio.create_subprocess_exec(
        *program,
        f"--log={tmp_path / 'up.log'}",
        cwd=ROOT,
        env=clean_environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await child.communicate()
    assert child.returncode == 0, output
    assert b"0 lost, 0 doubled, 0 changed." in output
