"""Operators pause, resume, abort, profile, and look into tokenizers through the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.contract.messages import ControlRequest
from inference.api.operator import OK_BODY
from tests.fakes.fake_replica import FakeReplica
from tests.inference.conftest import Gateway

ROUTES = (
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/abort_requests"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("POST", "/collective_rpc"),
    ("GET", "/tokenizer_info"),
    ("POST", "/reset_mm_cache"),
    ("POST", "/reset_encoder_cache"),
)


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch) -> list[ControlRequest]:
    """What fake replicas were told."""
    controls_sent: list[ControlRequest] = []
    answer = FakeReplica._control

    async def control(self: FakeReplica, message: ControlRequest) -> None:
        controls_sent.append(message)
        await answer(self, message)

    monkeypatch.setattr(FakeReplica, "_control", control)
    return controls_sent


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_tenants_may_not(gateway: Gateway, method: str, path: str) -> None:
    refused = await gateway.client.request(method, path)
    assert (refused.status, refused.error["code"]) == (403, "insufficient_scope")
    gateway.client.key = None
    assert (await gateway.client.request(method, path)).status == 401


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/pause", None, {"command": "pause", "mode": "abort"}),
        ("/pause?mode=keep&model=fake", None, {"command": "pause", "mode": "keep"}),
        ("/pause?mode=wait", None, {"command": "pause", "mode": "wait"}),
        ("/resume", None, {"command": "resume"}),
        ("/reset_prefix_cache", None, {"command": "reset_prefix_cache", "running": False}),
        ("/reset_encoder_cache", None, {"command": "reset_encoder_cache"}),
        ("/reset_mm_cache?model=fake", None, {"command": "reset_encoder_cache"}),
        (
            "/reset_prefix_cache?reset_running_requests=True&model=fake",
            None,
            {"command": "reset_prefix_cache", "running": True},
        ),
        ("/abort_requests", None, {"command": "abort_requests", "request_ids": []}),
        (
            "/abort_requests",
            {"request_ids": ["cmpl-1"]},
            {"command": "abort_requests", "request_ids": ["cmpl-1"]},
        ),
        ("/start_profile", None, {"command": "start_profile"}),
        ("/stop_profile", None, {"command": "stop_profile"}),
        ("/collective_rpc", {"method": "check_integrity"}, {"command": "check_integrity"}),
    ],
)
async def test_every_replica_is_told(
    operator: Gateway,
    controls: list[ControlRequest],
    path: str,
    body: Any,
    expected: dict[str, Any],
) -> None:
    async with operator.fake(replica_id="a"), operator.fake(replica_id="b"):
        await operator.refresh()
        reply = await operator.client.post(path, body)
    assert (reply.status, set(reply.json()["replicas"])) == (200, {"a", "b"})
    assert reply.json().get("status") == OK_BODY.get(expected["command"])
    assert len(controls) == 2
    for message in controls:
        assert {name: getattr(message, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/pause?mode=nap", None, 400, "mode"),
        ("/pause?model=nobody", None, 404, "model"),
        ("/reset_prefix_cache?reset_running_requests=all", None, 400, "reset_running_requests"),
        ("/abort_requests", {"request_ids": "x"}, 400, "request_ids"),
        ("/abort_requests", {"ids": ["x"]}, 400, "ids"),
        ("/collective_rpc", {"method": "os.system"}, 400, "method"),
        ("/collective_rpc", {"method": "check_integrity", "args": ["x"]}, 400, "args"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    operator: Gateway, controls: list[ControlRequest], path: str, body: Any, status: int, param: str
) -> None:
    async with operator.serving(operator.fake()):
        reply = await operator.client.post(path, body)
    assert (reply.status, reply.error["param"]) == (status, param)
    assert controls == []


async def test_who_is_paused(operator: Gateway) -> None:
    async with operator.serving(operator.fake(replica_id="a")):
        body = (await operator.client.get("/is_paused")).json()
    assert body == {"is_paused": False, "replicas": {"a": False}}


async def test_what_a_tokenizers_files_say(operator: Gateway) -> None:
    async with operator.serving(operator.fake()):
        info = (await operator.client.get("/tokenizer_info?model=fake")).json()
        missing = await operator.client.get("/tokenizer_info?model=nobody")
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["model_max_length"] == 4096
    assert "messages" in info["chat_template"]
    assert isinstance(info["bos_token"], str)
    assert missing.status == 404


async def aborted(gateway: Gateway, path: str, body: dict[str, Any]) -> Any:
    """The answer to a request that an operator aborts when it has run for some steps."""
    replica = gateway.fake(token_delay=0.01)
    async with gateway.serving(replica):
        asked = asyncio.create_task(gateway.client.post(path, body))
        while replica.steps < 3:
            await gateway.refresh()
        await gateway.client.post("/abort_requests")
        return await asked


async def test_an_aborted_completion_ends_with_what_it_has(operator: Gateway) -> None:
    body = {"model": "fake", "prompt": "x", "max_tokens": 400}
    answer = await aborted(operator, "/v1/completions", body)
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert 1 <= answer.json()["usage"]["completion_tokens"] < 400


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_message_ends_with_an_error(operator: Gateway, stream: bool) -> None:
    history = [{"role": "user", "content": "x"}]
    body = {"model": "fake", "messages": history, "max_tokens": 400, "stream": stream}
    answer = await aborted(operator, "/v1/messages", body)
    assert answer.status == (200 if stream else 503)
    assert b"aborted this request" in answer.body
    assert b'"type":"overloaded_error"' in answer.body.replace(b" ", b"")
    assert b"end_turn" not in answer.body


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_response_has_failed(operator: Gateway, stream: bool) -> None:
    body = {"model": "fake", "input": "x", "max_output_tokens": 400, "stream": stream}
    answer = await aborted(operator, "/v1/responses", body)
    assert b"aborted this request" in answer.body
    assert b'"status":"completed"' not in answer.body.replace(b" ", b"")
