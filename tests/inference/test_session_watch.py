"""The look at open sockets' sessions, against sockets that come and go while it's under way."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tenants import websockets as watch
from tenants.sessions import SessionSnapshot


async def test_a_socket_that_opens_during_a_look_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, go_on = threading.Event(), threading.Event()
    asked: list[set[SessionSnapshot]] = []

    def living(seen: set[SessionSnapshot]) -> set[SessionSnapshot]:
        asked.append(seen)
        looking.set()
        go_on.wait(60)
        return {session for session in seen if session.key != "ended"}

    monkeypatch.setattr(watch, "filter_valid_sessions", living)
    monkeypatch.setattr(watch, "POLL_INTERVAL_S", 0.01)
    names: list[str] = []

    def socket(name: str) -> watch.OnSessionEnd:
        async def is_finished() -> None:
            names.append(name)

        return is_finished

    sockets = {name: socket(name) for name in ("ended", "late")}
    session_watch = watch.SessionMonitor()
    session_watch.add(SessionSnapshot("ended", 1, ""), sockets["ended"])
    await asyncio.to_thread(looking.wait, 10)
    session_watch.add(SessionSnapshot("late", 1, ""), sockets["late"])
    go_on.set()
    async with asyncio.timeout(60):
        while len(asked) < 3:  # noqa: ASYNC110 - a thread appends
            await asyncio.sleep(0.01)
    assert names == ["ended"]
    assert {session.key for session in asked[-1]} == {"late"}
    session_watch.remove(sockets["late"])
