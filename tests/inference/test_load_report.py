"""Load reports by ORCA: for whom, of what, in which form."""

from __future__ import annotations

import json
import time

import pytest

from engine.contract.messages import EngineStats, Heartbeat, ModelInfo
from inference.engine_client.fleet import Replica
from inference.serving.respond import load_report
from tests.inference.conftest import Gateway

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ASKS = {"/v1/chat/completions": CHAT, "/v1/completions": {"model": "fake", "prompt": "hi"}}
HEADER = "endpoint-load-metrics"


def asked(form: str) -> dict[str, str]:
    return {"endpoint-load-metrics-format": form}


def replica(usage: float, waiting: int, state: str = "ready", submitted: int = 0) -> Replica:
    now = time.time()
    beat = Heartbeat(
        replica_id="r",
        incarnation="i",
        state=state,
        model=ModelInfo(name="fake", path="/m", max_model_len=64, vocab_size=8, dtype="float32"),
        at=now,
        progress_at=now,
        stats=EngineStats(kv_cache_usage_perc=usage, num_requests_waiting=waiting),
    )
    return Replica(beat, time.monotonic(), submitted)


def test_a_report_is_of_the_replicas_that_are_ready() -> None:
    replicas = [replica(0.25, 3, submitted=1), replica(0.75, 2), replica(1.0, 100, "draining")]
    form, _, body = load_report("JSON", replicas).partition(" ")
    figures = {"kv_cache_usage_perc": 0.5, "num_requests_waiting": 6.0}
    assert (form, json.loads(body)) == ("JSON", {"named_metrics": figures})
    assert load_report("TEXT", replicas) == (
        "TEXT named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=6.0"
    )
    assert json.loads(load_report("JSON", [])[5:])["named_metrics"]["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("path", ASKS)
async def test_an_operator_who_asks_gets_it_with_a_whole_answer(
    operator: Gateway, path: str
) -> None:
    async with operator.serving(operator.fake()):
        response = await operator.client.post(path, ASKS[path], headers=asked("json"))
        stream = await operator.client.post(
            path, ASKS[path] | {"stream": True}, headers=asked("TEXT")
        )
        other_responses = [
            await operator.client.post(path, ASKS[path], headers=headers)
            for headers in ({}, asked("XML"), asked(""))
        ]
    assert response.status == 200
    assert response.headers[HEADER].startswith('JSON {"named_metrics":{"kv_cache_usage_perc":0.0,')
    assert stream.status == 200
    assert HEADER not in stream.headers
    assert [(response.status, HEADER in response.headers) for response in other_responses] == [
        (200, False)
    ] * 3


async def test_a_tenant_isnt_told_what_others_load(gateway: Gateway) -> None:
    async with gateway.serving(gateway.fake()):
        reply = await gateway.client.post("/v1/chat/completions", CHAT, headers=asked("TEXT"))
    assert reply.status == 200
    assert HEADER not in reply.headers
