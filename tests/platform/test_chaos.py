"""`manage.py chaos` counts right: what is lost, doubled, changed or billed wrongly fails a run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from chaos import client, faults
from chaos.answer import Answer, Choice
from chaos.client import Lost, Reader
from chaos.clock import Clock
from chaos.kills import Kills
from chaos.kinds import KINDS, STREAM, asked_of, stopping
from chaos.ledger import Difference, Row, compare
from chaos.relay import Relay
from chaos.report import passed, summary, table
from chaos.run import Faults, Outcome, Request, Window

CHUNK = (
    '{"id": "chatcmpl-1", "usage": null, "choices": '
    '[{"index": 0, "delta": {"content": "%s"}, "finish_reason": null}]}'
)


def names_of(seed: int, names: list[str]) -> list[tuple[str, float, float]]:
    plans = itertools.islice(faults.plan(seed, names), 2 * len(names))
    return [(one.name, one.after_s, one.rng.random()) for one in plans]


def test_a_seed_makes_the_plan_and_each_round_has_every_fault() -> None:
    names = list(faults.FAULTS)
    assert names_of(3, names) == names_of(3, names)
    assert names_of(3, names) != names_of(4, names)
    assert {name for name, *_ in names_of(3, names)[: len(names)]} == set(faults.FAULTS)


def read(*parts: str) -> Answer:
    """Each part is what one connection brought."""
    answer = Answer()
    reader = Reader(answer)
    for part in parts:
        reader.connected("")
        for line in part.split("\n"):
            reader.line(line)
    return answer


def test_half_an_event_at_a_connections_end_is_none() -> None:
    first = f"id: a\ndata: {CHUNK % 'one'}\n\nid: b\ndata: {CHUNK % ' two'}"
    second = f"id: b\ndata: {CHUNK % ' two'}\n\ndata: [DONE]\n"
    answer = read(first, second)
    assert (answer.choices[0].text, answer.doubled) == ("one two", 0)


def test_an_event_that_comes_twice_is_doubled_and_an_error_is_a_loss() -> None:
    event = f"id: a\ndata: {CHUNK % 'one'}\n"
    assert read(event, event).doubled == 1
    with pytest.raises(Lost, match="engine_fault"):
        read('event: error\ndata: {"error": {"code": "engine_fault"}}\n')


async def test_a_stream_that_brings_nothing_but_heartbeats_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PATIENCE_S", 0.3)

    async def beat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b": heartbeat\n\n")
                await writer.drain()
                await asyncio.sleep(0.05)

    server = await asyncio.start_server(beat, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with client.clients(f"http://127.0.0.1:{port}", "key") as asking:
        response = await asking.ask(asked_of("plain", 0, "m", 5))
    server.close()
    assert response.lost == "nothing for 0 s"


def answer(name: str, tokens: int, **fields: object) -> Answer:
    return Answer(ids={name}, completion_tokens=tokens, is_finished=True, **fields)  # type: ignore[arg-type]


def row(name: str, tokens: int, endpoint: str = "chat.completions") -> Row:
    return Row(name, endpoint, 0, tokens, 200)


def test_the_ledger_is_compared_answer_by_answer() -> None:
    answers = [answer("a", 5), answer("b", 7), answer("resp_1", 3), answer("resp_2", 4)]
    rows = [row("a", 2), row("a", 3), row("b", 7), row("x", 7, "responses")]
    assert compare(rows, answers).tokens == 0
    # One too much and one too little don't make up for each other.
    assert compare([*rows[1:3], row("b", 2), rows[3]], answers).tokens == 4
    # Nor does what was billed as a prompt's make up for what wasn't as an answer's.
    swapped = Row("b", "chat.completions", 7, 0, 200)
    assert compare([*rows[:2], swapped, rows[3]], answers).tokens == 14
    unasked = compare([*rows, row("z", 9)], answers)
    assert (unasked.tokens, unasked.differences) == (
        9,
        ["z (nobody's, status 200): billed 9, received 0"],
    )


def outcome(*answers: Answer) -> Outcome:
    asked = asked_of("plain", 0, "m", 5)
    calm = Request(asked, 0, 0, answer("calm", 5))
    requests = [Request(asked, 1.0, 3.0, answer) for answer in answers]
    window = Window("gateway killed", 2.0, 4.0)
    return Outcome(requests, [window], {("plain", 0): calm})


def test_a_run_passes_only_if_nothing_is_lost_doubled_changed_or_billed_wrongly() -> None:
    good = answer("a", 5, longest=1.25)
    assert passed(outcome(good))
    assert not passed(outcome(good, Answer(lost="gone")))
    assert not passed(outcome(good, answer("b", 5, doubled=1)))
    assert not passed(outcome(good, answer("b", 6)))
    billed = outcome(good)
    billed.difference = Difference(tokens=1)
    assert not passed(billed)
    frozen = outcome(good)
    frozen.problems.append("a gateway with SIGSTOP was there 15 s later")
    assert not passed(frozen)


def test_an_answer_is_its_own_weights_whatever_the_name_leads_to() -> None:
    def answer_with(text: str, *digests: str) -> Answer:
        return Answer(choices={0: Choice(text=text)}, digests=set(digests), is_finished=True)

    asked = asked_of("adapter", 0, "m", 5)
    target = ("adapter", 0)
    for answer, well in (
        (answer_with("arr", "one"), True),
        (answer_with("sir", "two"), True),
        (answer_with("sir", "one"), False),
        (answer_with("arr", "two"), False),
        (answer_with("arr", "one", "two"), False),
        (answer_with("arr", "three"), False),
        (answer_with("arr"), False),
    ):
        calm, turned = (
            Request(asked, 0, 0, one)
            for one in (answer_with("arr", "one"), answer_with("sir", "two"))
        )
        run = Outcome([Request(asked, 1, 2, answer)], [], {target: calm}, {target: turned})
        assert passed(run) is well, answer


def test_each_connection_tells_its_weights() -> None:
    answer = Answer()
    reader = Reader(answer)
    for digest in ("one", "", "one", "two"):
        reader.connected(digest)
    assert answer.digests == {"one", "two"}


def test_the_table_has_what_ran_beside_a_fault() -> None:
    run_outcome = outcome(answer("a", 5, longest=1.25), Answer(lost="gone", longest=9))
    run_outcome.requests.append(Request(run_outcome.requests[0].asked, 5.0, 6.0, answer("late", 5)))
    run_outcome.skipped["disk full"] = "no root"
    head, _, *lines = table(run_outcome).splitlines()
    assert head == "| fault | times | plain |"
    assert lines[0] == "| gateway killed | 1 | 2: 1 lost, 9.0 s |"
    assert lines[1].startswith("| disk full | skipped |")
    assert "3 requests beside 1 faults: 1 lost, 0 doubled, 0 changed." in summary(run_outcome)


def test_every_second_stream_is_greedy_and_no_two_are_the_same() -> None:
    turns = Kills(40, 32, 600, 1, print)._turns()
    asked = [asked_of(*turn[0], "m", 600) for turn in turns]
    assert len(turns) == len({tuple(turn[0]) for turn in turns}) == 32
    assert [one.body.get("temperature") for one in asked] == [0, 1] * 16
    assert {one.kind for one in asked} == {
        name for name, kind in KINDS.items() if kind.how == STREAM
    }


def test_a_stop_string_stands_once_in_the_text_and_late() -> None:
    asked = stopping(asked_of("stop", 0, "m", 9), "one two " * 3 + "three four five six seven")
    (_, chunk) = asked.body["stop"]
    assert ("one two " * 3 + "three four five six seven").count(chunk) == 1


def test_a_text_that_repeats_itself_is_stopped_behind_its_beginning() -> None:
    text = "a tale of two cities, " * 20
    (_, chunk) = stopping(asked_of("stop", 0, "m", 9), text).body["stop"]
    assert text.find(chunk) == len("a tale of two cities, ") - 1


def test_a_changed_answer_says_what_is_another() -> None:
    calm, other = Answer(content=["same"]), Answer(content=["same"])
    calm.choices[0] = Choice(text="a fox met a crow")
    other.choices[0] = Choice(text="a fox met her")
    assert calm.differs(calm) == ""
    assert calm.differs(other) == "choice 0: text 'a crow' and 'her'"
    other.choices[1], other.prompt_tokens = Choice(), 3
    text = calm.differs(other)
    assert text.startswith("prompt_tokens '0' and '3'; ")
    assert text.endswith("; choice 1 is there once only")
    cached = Answer(content=["same"], choices=calm.choices, cached={0, 3})
    assert calm.differs(cached) == "cached tokens from event to event"


def test_what_must_be_the_same() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    calm, cached, other = Answer(), Answer(), Answer()
    for one, counts in ((calm, [0, 0]), (cached, [0, 3])):
        for count in counts:
            one.record_usage({**usage, "prompt_tokens_details": {"cached_tokens": count}})
    other.record_usage({**usage, "numerics_changed": True})
    assert len({str(one.same) for one in (calm, cached, other)}) == 3


async def outcome_later(calm: Outcome) -> Outcome:
    return calm


@pytest.mark.parametrize("lost", ["", "gone"])
def test_the_command_tells_what_became_of_each_and_fails_if_anybody_was_hurt(
    lost: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_outcome = outcome(answer("a", 5, longest=1.25), *[Answer(lost=lost)] * bool(lost))
    monkeypatch.setattr(Faults, "run", lambda self: outcome_later(run_outcome))
    with pytest.raises(CommandError, match="Not all went as") if lost else nullcontext():
        call_command("chaos", "--minutes", "1")
    printed = capsys.readouterr().out
    assert f"{1 if lost else 0} lost, 0 doubled, 0 changed." in printed
    assert "| gateway killed | 1 |" in printed


INVALID_FLAGS = [
    ["--minutes", "0"],
    ["--minutes", "nan"],
    ["--write", "/no/x"],
    ["--kills", "0"],
    ["--kills", "x"],
    ["--kills", "3", "--minutes", "1"],
    ["--kills", "3", "--fault", "disk full"],
    ["--kills", "3", "--ranks", "2"],
    ["--fault", "rain"],
]


@pytest.mark.parametrize("flags", INVALID_FLAGS)
def test_wrong_options_are_refused_before_anything_starts(flags: list[str]) -> None:
    with pytest.raises(CommandError):
        call_command("chaos", *flags)


@pytest.mark.system
def test_processes_have_the_hour_that_their_clock_says(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    assert not clock.why_not
    clock.shift(-7200)
    clock.shift(3600)
    program = "import time, datetime; print(time.time(), datetime.datetime.now().timestamp())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | clock.environment,
        capture_output=True,
        check=True,
    )
    for part in done.stdout.split():
        assert -3700 < float(part) - time.time() < -3500


async def test_a_cut_wire_holds_back_and_brings_all_when_it_is_mended(short_tmp: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_unix_server(echo, short_tmp / "redis.sock")
    relay = Relay(short_tmp / "relay.sock", short_tmp / "redis.sock")
    await relay.start()
    async with server:
        reader, writer = await asyncio.open_unix_connection(short_tmp / "relay.sock")
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        relay.cut(os.getpid())
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(3), 0.2)
        relay.mend(os.getpid())
        assert await asyncio.wait_for(reader.readexactly(3), 60) == b"two"
        writer.close()
        await relay.stop()
