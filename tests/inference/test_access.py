"""Who may ask, for what, how often; and that nothing gets around it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from catalog import access as catalog_access
from catalog.models import DesiredState, ServedModel
from inference.edge.handler import http_application
from tenants import actions, authentication
from tenants.actors import SYSTEM_ACTOR
from tenants.caller import AuthFailure
from tests.inference.asgi_client import AsgiClient, chat_body
from tests.inference.conftest import Gateway

CHAT = "/v1/chat/completions"
PRIVATE = ("/v1/models", "/v1/models/fake", CHAT, "/v1/completions", "/tokenize", "/detokenize")


def stranger(gateway: Gateway) -> AsgiClient:
    return AsgiClient(gateway.client.app)


async def test_without_a_key_nothing_is_served(served: Gateway) -> None:
    for path in PRIVATE:
        method = "GET" if "models" in path else "POST"
        reply = await stranger(served).request(method, path, chat_body())
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), path
        assert reply.error["type"] == "authentication_error"
        assert reply.headers["www-authenticate"].startswith("Bearer")


async def test_a_key_is_taken_from_either_header(served: Gateway) -> None:
    client, secret = stranger(served), served.rows.secret
    for headers in (
        {"authorization": f"Bearer {secret}"},
        {"authorization": f"bearer  {secret}"},
        {"x-api-key": secret},
    ):
        assert (await client.get("/v1/models", headers=headers)).status == 200


async def test_fault_21_headers_that_are_no_keys(served: Gateway) -> None:
    secret = served.rows.secret
    for value in (
        "Bearer",
        "Bearer ",
        f"Basic {secret}",
        f"Bearer {secret}x",
        f"Bearer {secret[:-1]}",
        "Bearer ' OR 1=1 --",
        f"Bearer {secret}\nX-Evil: 1",
        "Bearer \0",
        "Bearer sk-quire-" + "x" * (1 << 20),
        "Bearer ключ".encode().decode("latin1"),
    ):
        reply = await stranger(served).get("/v1/models", headers={"authorization": value})
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), value[:40]
        assert secret not in reply.body.decode()


async def test_fault_31_no_spelling_of_a_path_gets_around_the_key(served: Gateway) -> None:
    async def pages(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body"})

    client = AsgiClient(http_application(pages))
    smuggled = (
        "/v1/models",
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/v1/./models",
        "/health/../v1/models",
        "/v1/%6dodels",
        "http://localhost/v1/models",
        "/V1/models",
        "/v1/models\0",
        "/v1;x/models",
    )
    for path in smuggled:
        for headers in ({}, {"host": "evil.example"}, {"host": "a b"}, {"host": ""}):
            reply = await client.get(path, headers=headers)
            # 299: not the API's path, so Django's own pages answer for it.
            assert reply.status in (401, 404, 299), (path, reply.status)
            assert b'"data"' not in reply.body


async def test_fault_31_headers_that_proxies_set_mean_nothing(served: Gateway) -> None:
    for name in ("x-original-url", "x-rewrite-url", "x-forwarded-prefix", "x-http-method-override"):
        reply = await stranger(served).get("/health", headers={name: "/v1/models"})
        assert reply.status == 200
        assert b'"data"' not in reply.body


async def test_a_key_without_the_scope_is_forbidden(served: Gateway) -> None:
    @sync_to_async
    def limited() -> str:
        tenant = served.rows.tenant
        return actions.create_key(actor=SYSTEM_ACTOR, tenant=tenant, scopes=["models:read"]).secret

    client = AsgiClient(served.client.app, await limited())
    assert (await client.get("/v1/models")).status == 200
    reply = await client.chat()
    assert (reply.status, reply.error["type"]) == (403, "permission_error")


async def test_models_are_listed_and_found(served: Gateway) -> None:
    reply = (await served.client.get("/v1/models")).json()
    assert reply["object"] == "list"
    (model,) = reply["data"]
    assert (model["id"], model["object"]) == ("fake", "model")
    assert (await served.client.get("/v1/models/fake")).json() == model


async def test_unknown_and_foreign_models_look_the_same(served: Gateway) -> None:
    @sync_to_async
    def private() -> None:
        ServedModel.objects.create(
            name="org/theirs", source="x", desired_state=DesiredState.LOADED, public=False
        )
        catalog_access.clear_cache()

    await private()
    for name in ("nothing", "org/theirs", "../fake"):
        for reply in (
            await served.client.get(f"/v1/models/{name}"),
            await served.client.chat(model=name),
            await served.client.complete(model=name),
        ):
            assert (reply.status, reply.error["code"]) == (404, "model_not_found"), name
            assert reply.error["param"] == "model"


async def test_a_model_with_a_slash_in_its_name_is_found(served: Gateway) -> None:
    @sync_to_async
    def add() -> None:
        ServedModel.objects.create(
            name="org/model", source="x", desired_state=DesiredState.LOADED, managed=False
        )
        catalog_access.clear_cache()

    await add()
    assert (await served.client.get("/v1/models/org/model")).json()["id"] == "org/model"


@pytest.fixture
def limits(rows: Any) -> None:
    """Three requests and 2,000 tokens a minute."""
    tenant = rows.tenant
    tenant.requests_per_minute, tenant.tokens_per_minute = 3, 2000
    tenant.save()
    authentication.clear_cache()


async def test_limits_are_told_and_held(limits: None, served: Gateway) -> None:
    replies = [await served.client.chat(max_tokens=5) for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 200, 200, 429]
    first, last = replies[0].headers, replies[-1]
    assert first["x-ratelimit-limit-requests"] == "3"
    assert first["x-ratelimit-remaining-requests"] == "2"
    assert first["x-ratelimit-limit-tokens"] == "2000"
    assert first["x-ratelimit-reset-tokens"].endswith("s")
    assert (last.error["type"], last.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert int(last.headers["retry-after"]) >= 1
    assert len(await served.usage()) == 3


async def test_a_stream_carries_the_limits_too(limits: None, served: Gateway) -> None:
    reply = await served.client.chat(max_tokens=5, stream=True)
    assert reply.headers["x-ratelimit-remaining-requests"] == "2"


async def test_a_streams_tokens_wait_for_no_look_at_its_key(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.generation.background.RECHECK_KEY_S", 0.0)
    read_full, were_read = threading.Event(), list[bool]()

    def slow(key_id: int) -> AuthFailure:
        were_read.append(read_full.wait(60))
        return authentication.REVOKED

    monkeypatch.setattr(authentication, "_look_up_id", slow)
    async with gateway.serving(gateway.fake(token_delay=0.001)):
        exchange = gateway.client.open("POST", CHAT, chat_body(stream=True, max_tokens=20))
        assert (await exchange.head())[0] == 200
        read = b"".join([chunk async for chunk in exchange.chunks()])
        read_full.set()
    assert b"[DONE]" in read
    await gateway.usage()
    assert were_read
    assert all(were_read), "the stream waited"


async def test_fault_22_a_key_revoked_in_a_stream_ends_it_with_a_typed_event(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.generation.background.RECHECK_KEY_S", 0.0)

    @sync_to_async
    def revoke() -> None:
        actions.revoke_key(actor=SYSTEM_ACTOR, key=gateway.rows.key)

    async with gateway.serving(gateway.fake(token_delay=0.02)):
        exchange = gateway.client.open("POST", CHAT, chat_body(stream=True, max_tokens=400))
        status, _ = await exchange.head()
        chunks = exchange.chunks()
        read = await anext(chunks) + await anext(chunks)
        await revoke()
        read += b"".join([chunk async for chunk in chunks])
    assert status == 200
    assert b"event: error" in read
    assert b'"invalid_api_key"' in read
    assert b"[DONE]" not in read
    (usage,) = await gateway.usage()
    assert usage.status == 401
    assert 0 < usage.completion_tokens < 400
