"""The same views through Django's own handler and middleware, as `runserver` serves them."""

from __future__ import annotations

import asyncio
from typing import Any

from django.test import AsyncClient, AsyncRequestFactory
from django.urls import resolve

from engine.text.tokenizer import Tokenizer
from tests.inference.asgi_client import AsgiClient, chat_body, parse_events
from tests.inference.conftest import Gateway, until
from tests.inference.scripted import says

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def headers(gateway: Gateway) -> dict[str, str]:
    return {"authorization": f"Bearer {gateway.rows.secret}"}


async def test_answers_and_errors_are_the_same(gateway: Gateway, tokenizer: Tokenizer) -> None:
    client = AsyncClient()
    async with gateway.serving(gateway.scripted(says(tokenizer, "fox"))):
        for stream in (False, True):
            reply = await client.post(
                CHAT,
                chat_body(stream=stream),
                content_type="application/json",
                headers=headers(gateway),
            )
            assert reply.status_code == 200
            if stream:
                body = b"".join([part async for part in reply.streaming_content])
                events = parse_events(body)
                parts = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
                assert "".join(parts) == "fox"
                assert events[-1] == "[DONE]"
            else:
                assert reply.json()["choices"][0]["message"]["content"] == "fox"
    for path, status in (("/v1/nothing", 404), ("/v1/models", 401), (COMPLETION, 405)):
        reply = await client.get(path)
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_body_over_the_limit_is_refused(gateway: Gateway, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_body_bytes=1000)
    reply = await AsyncClient().post(
        CHAT, chat_body("x" * 2000), content_type="application/json", headers=headers(gateway)
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_client_that_leaves_is_noticed(gateway: Gateway) -> None:
    from django.core.handlers.asgi import ASGIHandler

    replica = gateway.fake(token_delay=0.1)
    client = AsgiClient(ASGIHandler(), gateway.rows.secret)
    local = {"host": "localhost"}
    async with gateway.serving(replica):
        for stream in (False, True):
            body = chat_body(stream=stream, max_tokens=1000)
            exchange = client.open("POST", CHAT, body, headers=local)
            await until(lambda: replica.running)
            await asyncio.sleep(0.05)
            await exchange.leave()
            await until(lambda: not replica.running)
        usage = await gateway.usage()
    assert [record.status for record in usage] == [499, 499]


async def test_a_stream_that_middleware_never_passes_on_ends(gateway: Gateway) -> None:
    """As where a client leaves while Django's middleware has the response: nobody closes it."""
    replica = gateway.fake(token_delay=0.1)
    body = chat_body(stream=True, max_tokens=1000)
    request = AsyncRequestFactory().post(
        CHAT, body, content_type="application/json", headers=headers(gateway)
    )
    async with gateway.serving(replica):
        match = resolve(CHAT)
        response = await match.func(request, *match.args, **match.kwargs)
        await until(lambda: replica.running)
        del response
        await until(lambda: not replica.running)
        (usage,) = await gateway.usage()
    assert usage.status == 499
