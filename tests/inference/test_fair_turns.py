"""Of what becomes due at once a few go on in each turn of the loop, and tenants take turns."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from engine.contract.messages import OutboxBatch, TokenDelta
from inference.engine_client.client import get_engine_client
from inference.engine_client.mailbox import TokenChunk, TokenQueue
from inference.loop.fair_dispatch import (
    FairDispatcher,
    LoopFairDispatcher,
    finish_dispatch,
    start_dispatch,
    wake_dispatch,
)
from tests.inference.conftest import Gateway

AT_ONCE = 4


async def test_fault_51_one_of_another_tenant_goes_on_before_the_rest_of_a_burst() -> None:
    turns, started_names = FairDispatcher(AT_ONCE), list[str]()

    async def one(name: str) -> None:
        await turns.wait(name[0])
        started_names.append(name)

    tasks = [asyncio.create_task(one(f"a{number}")) for number in range(200)]
    tasks += [asyncio.create_task(one(f"b{number}")) for number in range(2)]
    tasks[100].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert started_names.index("b0") <= AT_ONCE + 2
    assert started_names.index("b1") <= 2 * AT_ONCE
    assert [name for name in started_names if name[0] == "a"] == [
        f"a{n}" for n in range(200) if n != 100
    ]


async def test_one_of_a_tenant_of_whom_nobody_waits_goes_on_at_once_and_a_second_in_line() -> None:
    turns, started_names = FairDispatcher(AT_ONCE), list[str]()

    def give(name: str) -> None:
        waiter = asyncio.get_running_loop().create_future()
        turns.admit(name[0], waiter)
        if waiter.done():
            started_names.append(name)

    for number in range(200):
        give(f"a{number}")
    assert started_names == [f"a{number}" for number in range(AT_ONCE)]
    for tenant in "bbccdefg":
        give(tenant)
    # One each, and of no more tenants than go on of those who wait.
    assert started_names[AT_ONCE:] == ["b", "c", "d", "e"][:AT_ONCE]
    started_names.clear()
    await asyncio.sleep(0)
    for tenant in "adh":  # d went on at once before
        give(tenant)
    assert started_names == ["d", "h"]


async def test_while_a_crowd_begins_fewer_of_the_others_go_on_in_a_turn() -> None:
    begins = FairDispatcher(1)
    wakes = FairDispatcher(AT_ONCE, begins, max_when_busy=2)
    crowd, passed = list[int](), list[int]()

    async def begin(number: int) -> None:
        await begins.wait("a")
        crowd.append(number)

    async def wake(number: int) -> None:
        await wakes.wait("a")
        passed.append(number)

    tasks = [asyncio.create_task(begin(number)) for number in range(6)]
    tasks += [asyncio.create_task(wake(number)) for number in range(24)]
    seen: list[tuple[int, int]] = []
    while len(passed) < 24:
        await asyncio.sleep(0)
        seen.append((len(crowd), len(passed)))
    steps = [(started, woken - initial) for (_, initial), (started, woken) in pairwise(seen)]
    assert len(crowd) == 6
    assert max(woken for started, woken in steps if 1 < started < 5) == 2
    assert max(woken for _, woken in steps[-3:]) == AT_ONCE
    assert passed == sorted(passed)
    await asyncio.gather(*tasks)


async def test_who_comes_alone_does_not_wait() -> None:
    turns = FairDispatcher(AT_ONCE)
    for _ in range(3):
        waiting = turns.wait("a")
        try:
            waiting.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not turns._counting


@pytest.mark.parametrize(
    ("dispatch", "count"), [(start_dispatch, 1), (finish_dispatch, 4), (wake_dispatch, 16)]
)
async def test_so_many_start_end_and_are_woken_in_one_iteration(
    dispatch: LoopFairDispatcher, count: int
) -> None:
    waiters = [asyncio.get_running_loop().create_future() for _ in range(40)]
    for waiter in waiters:
        dispatch.current().admit("a", waiter)
    for turn in (1, 2):
        assert sum(waiter.done() for waiter in waiters) == turn * count
        await asyncio.sleep(0)
    for waiter in waiters:
        waiter.cancel()


async def test_of_a_steps_tokens_another_tenants_come_first_and_what_is_late_is_merged() -> None:
    dispatched: list[tuple[str, list[int]]] = []

    async def reader(tenant: str, mailbox: TokenQueue) -> None:
        while (chunks := await mailbox.get(1.0)) and not chunks[0].finish_reason:
            dispatched.append((tenant, chunks[0].token_ids))

    boxes = [("a", TokenQueue("a")) for _ in range(200)] + [("b", TokenQueue("b"))]
    tasks = [asyncio.create_task(reader(*box)) for box in boxes]
    await asyncio.sleep(0)
    for step in range(3):
        for _, mailbox in boxes:
            mailbox.push(TokenChunk(0, 0, [step]))
        await asyncio.sleep(0)
    for _ in range(300):
        await asyncio.sleep(0)
    assert not wake_dispatch.current()._counting
    assert "b" in [tenant for tenant, _ in dispatched][: wake_dispatch.current()._max_per_turn + 2]
    assert len(dispatched) < 3 * len(boxes)
    assert ("a", [0, 1, 2]) in dispatched
    assert sum(len(tokens) for _, tokens in dispatched) == 3 * len(boxes)
    for _, mailbox in boxes:
        mailbox.push(TokenChunk(0, 0, [], finish_reason="stop"))
    await asyncio.gather(*tasks)


async def test_a_step_of_thousands_of_outputs_is_handed_out_with_others_in_between(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, request_ids = get_engine_client(), list[str]()
    monkeypatch.setattr("inference.loop.fair_dispatch.SLICE_S", 0.0)
    monkeypatch.setattr(
        client, "_on_abort_reply", lambda delta: request_ids.append(delta.request_id)
    )
    names = [f"r{number}" for number in range(300)]
    deltas = [TokenDelta(request_id=name, token_ids=[5]) for name in names]
    batch = OutboxBatch(replica_id="r", incarnation="i", step=1, deltas=deltas)
    handing, turns = asyncio.create_task(client._dispatch_batch(batch)), 0
    while not handing.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 300
    assert request_ids == names
