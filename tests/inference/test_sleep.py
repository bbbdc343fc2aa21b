"""`/sleep`, `/wake_up` and `/is_sleeping`, and what clients meet meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from engine.contract.messages import ControlRequest
from tests.fakes.fake_replica import FakeReplica
from tests.inference.conftest import Gateway


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch) -> list[ControlRequest]:
    """What fake replicas were told; they sleep and wake up at once."""
    controls_sent: list[ControlRequest] = []
    answer = FakeReplica._control

    async def control(self: FakeReplica, message: ControlRequest) -> None:
        controls_sent.append(message)
        if message.command in ("sleep", "wake_up"):
            self.state = "sleeping" if message.command == "sleep" else "ready"
            await self._beat()
        await answer(self, message)

    monkeypatch.setattr(FakeReplica, "_control", control)
    return controls_sent


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")]
)
async def test_tenants_may_not(gateway: Gateway, method: str, path: str) -> None:
    refused = await gateway.client.request(method, path)
    assert (refused.status, refused.error["code"]) == (403, "insufficient_scope")


@pytest.mark.parametrize(
    ("path", "param", "status"),
    [
        ("/sleep?level=3", "level", 400),
        ("/sleep?level=", "level", 400),
        ("/sleep?level=1.0", "level", 400),
        ("/wake_up?tags=weights&tags=all", "tags", 400),
        ("/sleep?model=nobody", "model", 404),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    operator: Gateway, controls: list[ControlRequest], path: str, param: str, status: int
) -> None:
    async with operator.serving(operator.fake(replica_id="a")):
        refused = await operator.client.post(path)
    assert (refused.status, refused.error["param"]) == (status, param)
    assert controls == []


async def test_replicas_sleep_and_wake_up(
    operator: Gateway, controls: list[ControlRequest]
) -> None:
    async with operator.fake(replica_id="a"), operator.fake(replica_id="b"):
        await operator.refresh()
        slept = await operator.client.post("/sleep?level=2&model=fake")
        assert (slept.status, slept.json()["ok"]) == (200, True)
        asleep = (await operator.client.get("/is_sleeping")).json()
        woken = await operator.client.post("/wake_up?tags=weights&tags=kv_cache")
        awake = (await operator.client.get("/is_sleeping?model=fake")).json()
    assert asleep == {"is_sleeping": True, "replicas": {"a": True, "b": True}}
    assert woken.json()["ok"] is True
    assert awake == {"is_sleeping": False, "replicas": {"a": False, "b": False}}
    assert [(m.command, m.level, m.tags) for m in controls] == [
        *[("sleep", 2, [])] * 2,
        *[("wake_up", 1, ["weights", "kv_cache"])] * 2,
    ]


async def test_a_request_to_a_model_that_sleeps_gets_a_typed_error(
    operator: Gateway, controls: list[ControlRequest]
) -> None:
    body: dict[str, Any] = {"model": "fake", "prompt": "x", "max_tokens": 2}
    async with operator.serving(operator.fake(replica_id="a")):
        await operator.client.post("/sleep")
        await operator.refresh()
        refused = await operator.client.post("/v1/completions", body)
        assert (refused.status, refused.error["code"]) == (503, "engine_sleeping")
        assert "wakes it up" in refused.error["message"]
        health = await operator.client.get("/health")
        assert health.status == 503
        assert "sleeping" in health.body.decode()
        await operator.client.post("/wake_up")
        assert (await operator.client.post("/v1/completions", body)).status == 200


async def test_one_replica_may_sleep_while_another_serves(
    operator: Gateway, controls: list[ControlRequest]
) -> None:
    body: dict[str, Any] = {"model": "fake", "prompt": "x", "max_tokens": 2}
    async with operator.fake(replica_id="a") as asleep, operator.fake(replica_id="b"):
        asleep.state = "sleeping"
        await asleep._beat()
        await operator.refresh()
        assert (await operator.client.post("/v1/completions", body)).status == 200
        assert asleep.received == []
