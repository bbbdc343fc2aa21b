"""Work that outlives its request: whoever ends a gateway waits for all of it."""

from __future__ import annotations

import asyncio

import pytest

from inference.generation import background


async def test_what_background_work_spawns_is_waited_for_too() -> None:
    done = []

    async def last() -> None:
        await asyncio.sleep(0.05)
        done.append("last")

    async def first() -> None:
        await asyncio.sleep(0)
        background.spawn(last())
        done.append("first")

    background.spawn(first())
    await background.drain(10)
    assert done == ["first", "last"]


async def test_draining_ends_at_its_time(caplog: pytest.LogCaptureFixture) -> None:
    go_on = asyncio.Event()

    async def waiting() -> None:
        await go_on.wait()
        raise LookupError("in the background")

    background.spawn(waiting())
    await background.drain(0.01)
    assert not caplog.records
    go_on.set()
    await background.drain(10)
    assert "Work in the background failed." in caplog.text
