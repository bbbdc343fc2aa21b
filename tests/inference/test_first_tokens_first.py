"""Of a step's tokens those go out first that begin an answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.contract.messages import OutboxBatch, TokenDelta
from inference.engine_client.client import MAX_STARTED_PER_TICK, EngineClient, get_engine_client
from tests.inference.conftest import Gateway

Applied = list[tuple[str, int]]
SENT = (("a", 7), ("a", 8), ("b", 3), ("c", 0), ("c", 1))


def batch_of(*sent: tuple[str, int]) -> OutboxBatch:
    deltas = [TokenDelta(request_id=name, token_ids=[1], start=start) for name, start in sent]
    return OutboxBatch(replica_id="r", incarnation="i", step=1, deltas=deltas)


@pytest.fixture
async def client(gateway: Gateway) -> EngineClient:
    """This loop's."""
    return get_engine_client()


@pytest.fixture
def applied_deltas(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> Applied:
    """What is handed out, of requests that all run where it comes from."""
    applied: Applied = []
    flying = SimpleNamespace(placed=True, runs_at=lambda batch: True, is_prefilling=False)
    flights = SimpleNamespace(get=lambda name: flying)
    monkeypatch.setattr(
        client,
        "_dispatch_delta",
        EngineClient._dispatch_delta.__get__(
            SimpleNamespace(
                _flights=flights,
                _apply_delta=lambda flight, delta: applied.append((delta.request_id, delta.start)),
            )
        ),
    )
    return applied


async def test_an_answers_first_token_does_not_wait_for_those_that_go_on(
    client: EngineClient, applied_deltas: Applied
) -> None:
    await client._dispatch_batch(batch_of(*SENT))
    assert applied_deltas == [("c", 0), ("a", 7), ("a", 8), ("b", 3), ("c", 1)]


async def test_nor_for_the_next_turn_of_the_loop(
    client: EngineClient, applied_deltas: Applied
) -> None:
    batch = batch_of(*SENT)
    client._on_batch(batch)
    assert applied_deltas == [("c", 0)]
    await client._dispatch_batch(batch)
    assert applied_deltas == [("c", 0), ("a", 7), ("a", 8), ("b", 3), ("c", 1)]


async def test_of_very_many_first_tokens_the_rest_comes_in_turns(
    client: EngineClient, applied_deltas: Applied
) -> None:
    sent = [(f"r{number}", 0) for number in range(2 * MAX_STARTED_PER_TICK)]
    batch = batch_of(*sent)
    client._on_batch(batch)
    assert applied_deltas == sent[:MAX_STARTED_PER_TICK]
    await client._dispatch_batch(batch)
    assert applied_deltas == sent
