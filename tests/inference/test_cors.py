"""CORS: off by default, on for the sites that are named, for the API alone."""

from __future__ import annotations

from typing import Any

from tests.inference.conftest import Gateway

SITE = "https://app.example"
ASK = {
    "origin": SITE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-stainless-lang",
}


async def test_no_site_may_call_by_default(served: Gateway) -> None:
    reply = await served.client.get("/v1/models", headers={"origin": SITE})
    assert reply.status == 200
    assert "access-control-allow-origin" not in reply.headers


async def test_a_named_site_may_call(served: Gateway, settings: Any) -> None:
    settings.CORS_ALLOWED_ORIGINS = [SITE]
    served.client.key, key = None, served.client.key
    asked = await served.client.request("OPTIONS", "/v1/chat/completions", headers=ASK)
    assert asked.status == 200
    assert asked.headers["access-control-allow-origin"] == SITE
    allowed = asked.headers["access-control-allow-headers"]
    assert {"authorization", "x-api-key", "x-stainless-lang", "anthropic-version"} <= set(
        allowed.split(", ")
    )
    served.client.key = key
    reply = await served.client.get("/v1/models", headers={"origin": SITE})
    assert reply.headers["access-control-allow-origin"] == SITE
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    assert reply.headers["vary"].lower() == "origin"
    refused = await served.client.post("/v1/chat/completions", {}, headers={"origin": SITE})
    assert refused.status == 400  # its page may read why
    assert refused.headers["access-control-allow-origin"] == SITE


async def test_what_is_refused_before_its_body_is_read_may_be_read_too(
    served: Gateway, settings: Any
) -> None:
    settings.CORS_ALLOWED_ORIGINS = [SITE]
    settings.QUIRE = settings.QUIRE.replace(max_body_bytes=1024)
    headers = {"origin": SITE, "x-request-id": "mine"}
    for path in ("/v1/chat/completions", "/v1/messages"):
        reply = await served.client.post(path, {"user": "x" * 2000}, headers=headers)
        assert reply.status == 413
        assert reply.headers["access-control-allow-origin"] == SITE
        assert reply.headers["x-request-id"] == "mine"
    assert reply.json()["request_id"] == reply.headers["request-id"] == "mine"


async def test_every_path_of_the_api_may_be_called(served: Gateway, settings: Any) -> None:
    settings.CORS_ALLOWED_ORIGINS = [SITE]
    for path in ("/pooling", "/score", "/rerank", "/v2/rerank", "/classify", "/tokenize"):
        asked = await served.client.request("OPTIONS", path, headers=ASK)
        assert asked.headers["access-control-allow-origin"] == SITE, path


async def test_other_sites_and_what_is_no_api_stay_closed(served: Gateway, settings: Any) -> None:
    settings.CORS_ALLOWED_ORIGINS = [SITE]
    for path, origin in (("/v1/models", "https://evil.example"), ("/metrics", SITE)):
        reply = await served.client.get(path, headers={"origin": origin})
        assert "access-control-allow-origin" not in reply.headers, path


async def test_every_site_may_be_allowed(served: Gateway, settings: Any) -> None:
    settings.CORS_ALLOW_ALL_ORIGINS = True
    stream = await served.client.post(
        "/v1/completions",
        {"model": "fake", "prompt": "x", "stream": True},
        headers={"origin": "https://anyone.example"},
    )
    assert stream.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in stream.headers


async def test_options_without_a_site_is_no_method(served: Gateway) -> None:
    assert (await served.client.request("OPTIONS", "/v1/models")).status == 405
