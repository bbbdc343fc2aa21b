"""Thousands of things, without holding up the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from inference.loop.fair_dispatch import (
    INLINE_MAX_ITEMS,
    iterate_cooperatively,
    run_in_thread_if_many,
)


@pytest.mark.parametrize(
    ("count", "runs_in_thread"), [(INLINE_MAX_ITEMS, False), (INLINE_MAX_ITEMS + 1, True)]
)
def test_many_things_are_gone_through_in_another_thread(
    count: int, *, runs_in_thread: bool
) -> None:
    thread = asyncio.run(run_in_thread_if_many(count, threading.get_ident))
    assert (thread != threading.get_ident()) is runs_in_thread


def test_what_fails_beside_the_loop_fails_its_caller() -> None:
    def fail() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        asyncio.run(run_in_thread_if_many(INLINE_MAX_ITEMS + 1, fail))


def test_others_come_in_between_two_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.loop.fair_dispatch.SLICE_S", -1.0)
    seen: list[str] = []

    async def go() -> None:
        asyncio.get_running_loop().call_soon(seen.append, "other")
        async for number in iterate_cooperatively(range(3)):
            seen.append(str(number))

    asyncio.run(go())
    assert seen == ["other", "0", "1", "2"]
