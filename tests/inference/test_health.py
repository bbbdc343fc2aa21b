"""`/health`, `/metrics` and their neighbours."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError

from common import loops
from common.draining import draining
from engine.contract import messages as protocol
from engine.contract.redis_keys import replica_events_channel
from engine.contract.replica_state import KVHandover
from inference.api import health
from inference.engine_client.client import get_engine_client
from inference.engine_client.failover import FailoverMonitor
from inference.engine_client.fleet import ReplicaEventReader
from inference.engine_client.redis_streams import OutboxReader
from inference.metrics.flusher import Flusher
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tests.inference.asgi_client import AsgiClient
from tests.inference.conftest import Gateway
from tests.inference.scripted import says


@pytest.fixture
async def insider(gateway: Gateway) -> AsgiClient:
    """A client with an operator's key."""
    return AsgiClient(gateway.client.app, await key_with(gateway, "operator"))


async def key_with(gateway: Gateway, *scopes: str) -> str:
    make = sync_to_async(actions.create_key)
    return (await make(actor=SYSTEM_ACTOR, tenant=gateway.rows.tenant, scopes=scopes)).secret


async def test_health_is_green_when_every_model_can_be_asked(
    insider: AsgiClient, served: Gateway
) -> None:
    reply = await insider.get("/health")
    assert reply.status == 200
    body = reply.json()
    assert (body["status"], body["reasons"]) == ("ok", [])
    assert body["models"]["fake"]["ready_replicas"] == 1


async def test_fault_56_health_names_a_full_disk_and_stays_green_while_all_is_served(
    insider: AsgiClient, served: Gateway, settings: Any, tmp_path: Path
) -> None:
    settings.QUIRE = settings.QUIRE.replace(data_dir=tmp_path)
    assert (await insider.get("/health")).json()["warnings"] == []
    with patch.object(health, "MIN_FREE_BYTES", shutil.disk_usage(tmp_path).total * 2):
        reply = await insider.get("/health")
    (warning, *_) = [text for text in reply.json()["warnings"] if str(tmp_path) in text]
    assert "is full" in warning
    assert (reply.status, reply.json()["status"]) == (200, "ok")


async def test_health_is_red_without_a_replica_and_says_why(insider: AsgiClient) -> None:
    reply = await insider.get("/health")
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["reasons"] == ["fake: no replica sends heartbeats."]


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [("maxmemory", 1, "OOM"), ("min-replicas-to-write", 1, "NOREPLICAS")],
)
async def test_fault_47_health_names_what_redis_refuses_with(
    gateway: Gateway, insider: AsgiClient, setting: str, value: int, words: str
) -> None:
    await gateway.refresh()
    await gateway.redis.config_set(setting, value)
    try:
        await gateway.refresh()
        reply = await insider.get("/health")
    finally:
        await gateway.redis.config_set(setting, 0)
    assert reply.status == 503
    assert reply.json()["reasons"][0].startswith(f"Redis refuses commands: {words} ")
    await gateway.refresh()
    reply = await insider.get("/health")
    assert reply.json()["reasons"] == ["fake: no replica sends heartbeats."]


async def test_health_is_red_while_a_replica_loads(gateway: Gateway, insider: AsgiClient) -> None:
    async with gateway.serving(gateway.fake(load_seconds=60)):
        reply = await insider.get("/health")
        chat = await gateway.client.chat()
    assert reply.status == 503
    assert "loading" in reply.json()["reasons"][0]
    assert chat.status == 503
    assert "loading" in chat.error["message"]


async def test_health_is_red_while_the_models_only_replica_encodes_for_others(
    gateway: Gateway, insider: AsgiClient
) -> None:
    role = KVHandover(role="kv_both", key_space="k", step_tokens=4, ec_role="ec_producer")
    async with gateway.serving(gateway.fake(kv_handover=role)):
        reply = await insider.get("/health")
        assert (reply.status, reply.json()["models"]["fake"]["ready"]) == (503, False)
        assert "only such as encode media" in reply.json()["reasons"][0]
        async with gateway.serving(gateway.fake()):
            assert (await insider.get("/health")).status == 200


async def test_fault_27_health_is_red_when_the_engine_stands_still_behind_its_heartbeats(
    gateway: Gateway, insider: AsgiClient
) -> None:
    replica = gateway.fake()
    async with gateway.serving(replica):
        stuck = time.time() - 30
        original = protocol.encode

        def stale(message: Any) -> bytes:
            if isinstance(message, protocol.Heartbeat):
                message.progress_at = stuck
            return original(message)

        protocol.encode = stale  # type: ignore[assignment]
        try:
            await replica._beat()
            await gateway.refresh()
            reply = await insider.get("/health")
        finally:
            protocol.encode = original  # type: ignore[assignment]
    assert reply.status == 503
    assert "no progress for 30 s" in reply.json()["reasons"][0]


async def test_health_is_red_without_redis(served: Gateway, insider: AsgiClient) -> None:
    get_engine_client().watchman.mark_redis_suspect()
    reply = await insider.get("/health")
    assert reply.status == 503
    assert "Redis" in reply.json()["reasons"][0]


async def test_strangers_and_tenants_read_no_more_than_well_or_not(served: Gateway) -> None:
    for key in (None, served.client.key, "sk-quire-nonsense"):
        reply = await AsgiClient(served.client.app, key).get("/health")
        assert (reply.status, reply.json()) == (200, {"status": "ok"})


async def test_metrics_are_for_insiders(served: Gateway, insider: AsgiClient) -> None:
    app = served.client.app
    assert (await AsgiClient(app).get("/metrics")).status == 401
    assert (await AsgiClient(app, served.client.key).get("/metrics")).status == 403
    assert (await insider.get("/metrics")).status == 200


async def test_a_metrics_token_or_a_named_address_is_an_insider(
    served: Gateway, settings: Any
) -> None:
    app = served.client.app
    settings.QUIRE = settings.QUIRE.replace(metrics_token="a token of our own")
    for path in ("/metrics", "/health"):
        assert b"fake" in (await AsgiClient(app, "a token of our own").get(path)).body
    assert (await AsgiClient(app, "another token").get("/metrics")).status == 401
    settings.QUIRE = settings.QUIRE.replace(metrics_addresses=("10.0.0.0/8",))
    assert (await AsgiClient(app).get("/metrics")).status == 401
    settings.QUIRE = settings.QUIRE.replace(metrics_addresses=("10.0.0.0/8", "127.0.0.1/32"))
    for path in ("/metrics", "/health"):
        assert b"fake" in (await AsgiClient(app).get(path)).body


async def test_ping_and_version(gateway: Gateway) -> None:
    client = AsgiClient(gateway.client.app)
    assert (await client.get("/ping")).status == 200
    assert (await client.post("/ping")).status == 200
    assert re.match(r"\d+\.\d+", (await client.get("/version")).json()["version"])


async def test_ready_is_about_redis_and_the_database_and_not_about_models(
    gateway: Gateway, insider: AsgiClient
) -> None:
    stranger = AsgiClient(gateway.client.app)
    assert (await stranger.get("/live")).status == 200
    reply = await stranger.get("/ready")  # no replica runs
    assert (reply.status, reply.json()) == (200, {"status": "ok"})

    def broken() -> None:
        raise OperationalError("no route to 10.1.2.3")

    with (
        patch.object(health, "_database", health.DatabaseProbe()),
        patch.object(health, "_select", broken),
    ):
        reply = await stranger.get("/ready")
        assert (reply.status, reply.json()) == (503, {"status": "unready"})
        reply = await insider.get("/ready")
    assert reply.json()["reasons"] == ["The database can't be used: OperationalError."]


async def test_a_gateway_that_is_about_to_end_is_unready_and_alive(
    gateway: Gateway, insider: AsgiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_database", health.DatabaseProbe())
    monkeypatch.setattr(draining, "is_set", lambda: True)
    reply = await insider.get("/ready")
    assert (reply.status, reply.json()["reasons"]) == (503, ["This gateway is shutting down."])
    assert (await insider.get("/live")).status == 200


async def test_fault_29_a_database_that_says_nothing_is_asked_once_and_isnt_waited_for() -> None:
    release, asked = threading.Event(), []

    def hangs() -> None:
        asked.append(1)
        release.wait(60)

    probe = health.DatabaseProbe()
    probe.INTERVAL_S = 0.05  # type: ignore[misc]
    try:
        with patch.object(health, "_select", hangs):
            troubles = await asyncio.gather(*(probe.trouble() for _ in range(50)))
            troubles.append(await probe.trouble())
    finally:
        release.set()
    assert set(troubles) == {"The database doesn't answer."}
    assert len(asked) == 1


async def test_fault_47_ready_names_what_redis_refuses_with(
    gateway: Gateway, insider: AsgiClient
) -> None:
    await gateway.refresh()
    await gateway.redis.config_set("maxmemory", 1)
    try:
        await until_trouble(insider)
    finally:
        await gateway.redis.config_set("maxmemory", 0)


async def until_trouble(insider: AsgiClient) -> None:
    for _ in range(100):
        reply = await insider.get("/ready")
        if reply.status == 503:
            assert "OOM" in reply.json()["reasons"][0]
            return
        await asyncio.sleep(0.05)
    raise AssertionError("/ready stayed green")


async def test_the_record_of_a_finished_request_is_logged(
    gateway: Gateway, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "inference.generation.generation")
    async with gateway.serving(gateway.scripted(says(tokenizer, "a b c d"))):
        assert (await gateway.client.chat(max_tokens=3)).status == 200
    (line,) = [record.getMessage() for record in caplog.records if "chunks" in record.msg]
    assert "/0/0: queued 0.000 s" in line


async def test_tokenize_and_detokenize(served: Gateway, tokenizer: Any) -> None:
    reply = await served.client.post(
        "/tokenize", {"model": "fake", "prompt": "the fox", "return_token_strs": True}
    )
    body = reply.json()
    assert body["tokens"] == tokenizer.encode("the fox")
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 2048)
    # As the vocabulary has them, as vLLM gives them.
    assert "".join(body["token_strs"]) == "theĠfox"
    chat = await served.client.post(
        "/tokenize", {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    )
    back = await served.client.post(
        "/detokenize", {"model": "fake", "tokens": chat.json()["tokens"]}
    )
    assert back.json()["prompt"] == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    for bad in ({"model": "fake"}, {"model": "fake", "prompt": "x", "messages": []}):
        assert (await served.client.post("/tokenize", bad)).status == 400
    for tokens in ([-1], [10**9], ["x"], [True]):
        reply = await served.client.post("/detokenize", {"model": "fake", "tokens": tokens})
        assert reply.status == 400


@pytest.mark.parametrize(
    ("loop", "owner", "function"),
    [
        ("watchman", FailoverMonitor, "tick"),
        ("outbox reader", OutboxReader, "_read"),
        ("outbox trimmer", OutboxReader, "_trim"),
        ("replica events", ReplicaEventReader, "_dispatch"),
        ("metrics flusher", Flusher, "_tick"),
    ],
)
async def test_fault_78_a_loop_of_the_engine_client_goes_on_after_an_error_and_health_tells_of_it(
    loop: str,
    owner: type,
    function: str,
    served: Gateway,
    insider: AsgiClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loops, "RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(loops, "_latest", {})
    original, calls = getattr(owner, function), []

    async def call(self: Any, *args: Any) -> Any:
        calls.append(function)
        if len(calls) == 1:
            raise RuntimeError("nobody foresaw this")
        return await original(self, *args)

    monkeypatch.setattr(owner, function, call)
    client = get_engine_client()
    channel = replica_events_channel(client.settings.key_prefix)
    while len(calls) < 2:
        await client.redis.publish(channel, b"unreadable")
        assert (await served.client.chat(max_tokens=2)).status == 200
        await asyncio.sleep(0.05)
    reply = await insider.get("/health")
    assert reply.status == 200
    assert [text for text in reply.json()["warnings"] if text.startswith(f"{loop} failed")]
