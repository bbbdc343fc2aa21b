"""Of a step's tokens those go out first that begin an answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.contract.protocol import OutboxBatch, TokenDelta
from inference.engine_client import get_engine_client
from tests.inference.conftest import Gateway


async def test_an_answers_first_token_does_not_wait_for_those_that_go_on(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = get_engine_client()
    taken: list[tuple[str, int]] = []
    flying = SimpleNamespace(placed=True, runs_at=lambda batch: True)
    deltas = [
        TokenDelta(request_id=name, token_ids=[1], start=at)
        for name, at in (("a", 7), ("a", 8), ("b", 3), ("c", 0), ("c", 1))
    ]
    batch = OutboxBatch(replica_id="r", incarnation="i", step=1, deltas=deltas)
    with monkeypatch.context() as patch:
        patch.setattr(client, "_flights", dict.fromkeys("abc", flying))
        patch.setattr(
            client, "_take", lambda flight, delta: taken.append((delta.request_id, delta.start))
        )
        await client._deliver(batch)
    assert taken == [("c", 0), ("a", 7), ("a", 8), ("b", 3), ("c", 1)]
