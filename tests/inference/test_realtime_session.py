"""A realtime session ends after its time, though nothing is sent."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator

from inference.api.audio import realtime
from inference.api.audio.realtime import RealtimeConsumer


# Channels closes connections to the database that another test may have left open.
@pytest.mark.django_db(transaction=True)
def test_a_session_that_expires_is_told_so_and_leaves_no_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def authenticate(self: Any, protocols: list[str], tenant: str | None) -> Any:
        return SimpleNamespace(tenant="ada")

    monkeypatch.setattr(RealtimeConsumer, "_authenticate", authenticate)
    monkeypatch.setattr(realtime, "MAX_SESSION_S", 0.2)

    async def session() -> None:
        socket = WebsocketCommunicator(RealtimeConsumer.as_asgi(), realtime.PATH)
        initial_tasks = asyncio.all_tasks()
        connected, _ = await socket.connect(timeout=60)
        assert connected
        created = json.loads(await socket.receive_from(timeout=60))
        assert created["type"] == "session.created"
        assert abs(created["session"]["expires_at"] - time.time()) < 60
        error = json.loads(await socket.receive_from(timeout=60))["error"]
        assert error["code"] == "session_expired"
        assert (await socket.receive_output(timeout=60))["type"] == "websocket.close"
        await socket.disconnect(timeout=60)
        assert asyncio.all_tasks() == initial_tasks

    asyncio.run(session())
