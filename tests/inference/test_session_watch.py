"""The look at open sockets' sessions, against sockets that come and go while it's under way."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tenants import websockets as watch
from tenants.sessions import SeenSession


async def test_a_socket_that_opens_during_a_look_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, go_on = threading.Event(), threading.Event()
    asked: list[set[SeenSession]] = []

    def living(seen: set[SeenSession]) -> set[SeenSession]:
        asked.append(seen)
        looking.set()
        go_on.wait(10)
        return {each for each in seen if each.key != "ended"}

    monkeypatch.setattr(watch, "living_sessions", living)
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.01)
    told: list[str] = []

    def socket(name: str) -> watch.Ended:
        async def ended() -> None:
            told.append(name)

        return ended

    sockets = {name: socket(name) for name in ("ended", "late")}
    session_watch = watch.SessionWatch()
    session_watch.add(SeenSession("ended", 1, ""), sockets["ended"])
    await asyncio.to_thread(looking.wait, 10)
    session_watch.add(SeenSession("late", 1, ""), sockets["late"])
    go_on.set()
    async with asyncio.timeout(60):
        while len(asked) < 3:  # noqa: ASYNC110 - a thread appends
            await asyncio.sleep(0.01)
    assert told == ["ended"]
    assert {each.key for each in asked[-1]} == {"late"}
    session_watch.remove(sockets["late"])
