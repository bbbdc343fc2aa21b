"""The operator's endpoints, and who may use them."""

from __future__ import annotations

import asyncio

import pytest

from inference.engine_client.client import get_engine_client
from tests.inference.conftest import Gateway

PATHS = (("POST", "/reset_prefix_cache"), ("GET", "/load"), ("GET", "/server_info"))


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_tenants_may_not(gateway: Gateway, method: str, path: str) -> None:
    refused = await gateway.client.request(method, path)
    assert (refused.status, refused.error["code"]) == (403, "insufficient_scope")
    gateway.client.key = None
    assert (await gateway.client.request(method, path)).status == 401


async def test_every_replicas_cache_is_reset(operator: Gateway) -> None:
    async with operator.fake(replica_id="a"), operator.fake(replica_id="b"):
        await operator.refresh()
        reply = await operator.client.post("/reset_prefix_cache")
    assert reply.status == 200
    answer = {"ok": True, "detail": "fake"}
    assert reply.json() == {
        "ok": True,
        "success": True,
        "replicas": {"a": answer, "b": answer},
    }


async def test_a_replica_that_does_not_answer_is_named(
    operator: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.api.operator.ANSWER_WITHIN_S", 0.05)
    replica = operator.fake(replica_id="a")
    monkeypatch.setattr(replica, "_control", lambda message: asyncio.sleep(0))
    async with operator.serving(replica):
        reply = await operator.client.post("/reset_prefix_cache")
    assert reply.status == 503
    assert reply.json()["replicas"]["a"]["ok"] is False
    assert reply.json()["success"] is False


async def test_the_load_is_what_runs_and_waits(operator: Gateway) -> None:
    async with operator.serving(operator.fake(replica_id="a")):
        body = (await operator.client.get("/load")).json()
    assert body["server_load"] == 0
    assert body["replicas"]["a"] == {
        "model": "fake",
        "state": "ready",
        "running": 0,
        "waiting": 0,
        "kv_cache_usage": 0.0,
    }


async def test_the_load_has_what_no_heartbeat_tells_yet(
    operator: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = operator.fake(replica_id="a")
    monkeypatch.setattr(replica, "_heart", asyncio.Event().wait)
    async with operator.serving(replica):
        (registered,) = get_engine_client().fleet.of_model("fake")
        registered.submitted += 2
        body = (await operator.client.get("/load")).json()
    assert (body["server_load"], body["replicas"]["a"]["waiting"]) == (2, 2)


async def test_server_info_names_what_runs_and_no_secret(operator: Gateway) -> None:
    async with operator.serving(operator.fake(replica_id="a")):
        reply = await operator.client.get("/server_info")
    body = reply.json()
    assert body["gateway"]["settings"]["max_prompts"] == 2048
    assert body["replicas"]["a"]["model"]["name"] == "fake"
    assert operator.redis_url not in reply.body.decode()
