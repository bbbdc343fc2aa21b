"""Answers tell how long they took, where the operator wants it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.contract.messages import FlightRecord
from inference.generation.record import compute_request_metrics
from tests.inference.conftest import Gateway

FLIGHT = FlightRecord(queue_time=0.5, prefill_time=0.25, decode_time=1.0, num_steps=5)
EXPECTED = {
    "queue_time_ms": 500.0,
    "time_to_first_token_ms": 250.0,
    "generation_time_ms": 1000.0,
    "mean_itl_ms": 250.0,
    "tokens_per_second": 4.0,
}


def flight(tokens: list[int], *records: FlightRecord) -> Any:
    return SimpleNamespace(
        tokens=[[0] * count for count in tokens], records=dict(enumerate(records))
    )


def test_several_outputs_are_told_together() -> None:
    later = FlightRecord(queue_time=1.0, prefill_time=0.5, decode_time=2.0)
    assert compute_request_metrics([flight([5, 11], FLIGHT, later)]) == {
        "queue_time_ms": 500.0,
        "time_to_first_token_ms": 250.0,
        "generation_time_ms": 2750.0,
        "mean_itl_ms": 275.0,
        "tokens_per_second": 5.333,
    }


def test_what_isnt_known_is_left_out() -> None:
    assert compute_request_metrics([flight([5])]) == {}
    one = compute_request_metrics([flight([1], FlightRecord(queue_time=0.5))])
    assert one == {
        "queue_time_ms": 500.0,
        "time_to_first_token_ms": 0.0,
        "generation_time_ms": 0.0,
    }


@pytest.mark.parametrize("is_enabled", [True, False])
async def test_answers_have_them(gateway: Gateway, settings: Any, *, is_enabled: bool) -> None:
    settings.QUIRE = settings.QUIRE.replace(per_request_metrics=is_enabled)
    replica = gateway.fake()
    replica.flight = FLIGHT
    chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    text = {"model": "fake", "prompt": "x", "max_tokens": 5}
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    expected = EXPECTED if is_enabled else None
    async with gateway.serving(replica):
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
            full_response = await gateway.client.post(path, body)
            assert full_response.json().get("metrics") == expected
            streamed = await gateway.client.post(path, body | with_usage)
            chunks = streamed.events[:-1]
            assert [chunk.get("metrics") for chunk in chunks] == [
                *([None] * (len(chunks) - 1)),
                expected,
            ]
            assert not any("metrics" in chunk for chunk in chunks[:-1])
