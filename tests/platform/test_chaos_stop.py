"""`manage.py chaos` is told to stop: it ends, and nothing that it started or wrote stays."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos import instance, run
from chaos.answer import Answer
from chaos.ending import end_all, processes_of, to_its_end
from chaos.run import Faults, Outcome, Request
from tests.e2e.product import ROOT, clean_environment

pytestmark = pytest.mark.system

#: A process that no signal but SIGKILL ends, with one in a session of its own that stands still,
#: an orphan, and a dead child.
STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
frozen = subprocess.Popen(sleep, start_new_session=True)
os.kill(frozen.pid, signal.SIGSTOP)
child = os.fork()
if not child:
    subprocess.Popen(sleep, start_new_session=True)
    os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # dead, and not taken note of
print("all there", flush=True)
time.sleep(600)
"""


def test_all_that_runs_on_the_data_is_ended_stubborn_frozen_or_orphaned(tmp_path: Path) -> None:
    mine, other_data = tmp_path / "data", tmp_path / "data-of-others"
    start = lambda folder: subprocess.Popen(  # noqa: E731
        [sys.executable, "-c", STUBBORN],
        env=os.environ | {"QUIRE_DATA_DIR": str(folder)},
        stdout=subprocess.PIPE,
    )
    with start(mine) as process, start(other_data) as other:
        for one in (process, other):
            assert one.stdout is not None
            assert one.stdout.readline() == b"all there\n"
        try:
            assert len(processes_of(mine)) == 3
            end_all(mine)
            assert process.wait() == -signal.SIGKILL
            assert processes_of(mine) == []
            assert len(processes_of(other_data)) == 3
        finally:
            end_all(mine)
            end_all(other_data)


async def test_who_is_told_to_stop_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that have been asking for an answer through a fault are patient for minutes."""
    asking = asyncio.Event()

    class Patient:
        async def ask(self, asked: Any) -> Answer:
            asking.set()
            await asyncio.sleep(3600)
            return Answer()

    async def undisturbed(self: Faults, instance: Any, client: Any) -> None:
        for turn in self._turns():
            for kind, number in turn:
                asked = run.asked_of(kind, number, "m", 1)
                self._outcome.expected[kind, number] = Request(asked, 0)

    async def harm(self: Faults, instance: Any, client: Any) -> None:
        await asking.wait()
        telling.cancel()
        await asyncio.sleep(3600)

    monkeypatch.setattr(Faults, "_undisturbed", undisturbed)
    monkeypatch.setattr(Faults, "_harm", harm)
    monkeypatch.setattr(run.ledger, "read", lambda database: {})
    harmed: Any = type("Instance", (), {"database": None})
    client: Any = Patient()
    telling = asyncio.ensure_future(Faults(1, 1, print).run_on(harmed, client))
    with pytest.raises(asyncio.CancelledError):
        await telling
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_instance_that_does_not_end_fails_a_run_and_is_ended(
    monkeypatch: pytest.MonkeyPatch, short_tmp: Path
) -> None:
    """What the run has found is told all the same."""
    outcome = Outcome()

    def stubborn(disk: Any, more: Any, relay: Any, ready: Path, log: Path, *sizes: Any) -> Any:
        ready.write_text('{"url": "http://127.0.0.1:1", "api_key": "k", "model": "m"}')
        log.touch()
        environment = os.environ | {"QUIRE_DATA_DIR": str(disk.folder)}
        command = [sys.executable, "-c", STUBBORN]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline()  # from now on it's stubborn
        return process

    async def ran(self: Faults, of: Any, client: Any) -> Outcome:
        assert processes_of(of.data_dir)
        data_dirs.append(of.data_dir)
        self._outcome = outcome
        return outcome

    data_dirs: list[Path] = []
    monkeypatch.setattr(tempfile, "tempdir", str(short_tmp))
    monkeypatch.setattr(instance, "_up", stubborn)
    monkeypatch.setattr(instance, "_load_pooling_model", lambda of: None)
    monkeypatch.setattr(instance.Instance, "is_healthy", lambda of: True)
    monkeypatch.setattr(instance.Instance, "served", lambda of: instance.ADAPTERS)
    monkeypatch.setattr(instance, "STOP_TIMEOUT_S", 0.3)
    monkeypatch.setattr(Faults, "run_on", ran)
    assert await Faults(1, 1, print).run() is outcome
    assert outcome.problems == ["the instance was there 0 s after SIGTERM"]
    (data_dir,) = data_dirs
    assert processes_of(data_dir) == []
    assert not data_dir.parent.exists()


async def test_what_a_thread_starts_is_there_before_its_stop_is_told() -> None:
    done: list[str] = []

    def slow(what: str) -> None:
        time.sleep(0.2)
        done.append(what)

    starting = asyncio.ensure_future(to_its_end(lambda: slow("a server")))
    await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert done == ["a server"]


#: As docs/reliability.md promises.
GONE_WITHIN_S = 30.0


@asynccontextmanager
async def started_chaos(folder: Path, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, whose temporary files are in `folder`. Whatever is left at the end fails."""
    os.mkdir(folder)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "manage.py", "chaos", "--minutes=5", "--seed=1", *flags),
        cwd=ROOT,
        env=clean_environment() | {"TMPDIR": str(folder)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    yield child
    assert child.stderr is not None
    async with asyncio.timeout(GONE_WITHIN_S):
        reported_text = (await child.stderr.read()).decode()
        assert await child.wait() != 0  # 1, unless a second signal came when all was over
    assert "Error: Stopped.\n" in reported_text, reported_text
    assert os.listdir(folder) == []
    mark = os.fsencode(str(folder))
    assert not [pid for pid, text in environments() if mark in text]


def environments() -> list[tuple[str, bytes]]:
    """Of all processes that live."""
    environments = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environments.append((entry.name, (entry / "environ").read_bytes()))
        except OSError:
            continue
    return environments


async def wait_for_words(child: asyncio.subprocess.Process, words: bytes) -> None:
    assert child.stderr is not None
    async for line in child.stderr:
        if words in line:
            return
    pytest.fail(f"it ended before it said {words!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_at_any_moment_of_the_start_leaves_nothing(
    number: signal.Signals, short_tmp: Path
) -> None:
    """Twice, as by somebody who is impatient."""
    moment = random.SystemRandom().uniform(0, 4)
    async with started_chaos(short_tmp / f"stop{number}") as child:
        await wait_for_words(child, b"Starting an instance")
        await asyncio.sleep(moment)
        child.send_signal(number)
        await asyncio.sleep(0.1)
        if child.returncode is None:
            child.send_signal(number)


#: What was said last before the signal, and the most seconds in between: faults that freeze and
#: cut off are over before they are told of.
MOMENTS = [
    ("Asking everything", 3.0, ("Redis stands still",)),
    ("Asking everything", 15.0, ("Redis stands still",)),
    ("Asking everything", 15.0, ("Redis fails over",)),
    ("Asking everything", 20.0, ("disk full", "replica cut off")),
    ("whole again", 1.0, ("gateway frozen",)),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tokenizer", "max_delay_s", "faults"), MOMENTS)
async def test_a_signal_at_any_moment_of_the_harm_leaves_nothing(
    tokenizer: str, max_delay_s: float, faults: tuple[str, ...], short_tmp: Path
) -> None:
    moment = random.SystemRandom().uniform(0, max_delay_s)
    folder = short_tmp / f"stop{MOMENTS.index((tokenizer, max_delay_s, faults))}"
    async with started_chaos(folder, *(f"--fault={name}" for name in faults)) as child:
        await wait_for_words(child, tokenizer.encode())
        await asyncio.sleep(moment)
        child.send_signal(signal.SIGTERM)
