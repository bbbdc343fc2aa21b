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
