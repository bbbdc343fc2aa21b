"""What a gateway process does before it takes requests."""

from __future__ import annotations

from typing import Any

import pytest
from django.urls import get_resolver, resolvers

from config import asgi
from inference.edge.handler import URLCONF


async def test_views_are_loaded_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    resolvers._get_cached_resolver.cache_clear()
    loaded: list[bool] = []

    async def serve(*_: Any) -> None:
        loaded.extend("url_patterns" in vars(get_resolver(name)) for name in (URLCONF, None))

    async def nothing() -> None: ...

    for name in (
        "start_drainer",
        "start_gateway_heartbeat",
        "start_writer",
        "stop_keeper",
        "stop_writer",
    ):
        monkeypatch.setattr(asgi, name, lambda: None)
    monkeypatch.setattr(asgi, "stop_drainer", nothing)
    monkeypatch.setattr(asgi, "gateway_lifespan", serve)
    await asgi.lifespan({}, nothing, lambda _: None)
    assert loaded == [True, True]


@pytest.mark.parametrize("server_has_lifespan", [True, False])
async def test_a_server_without_a_lifespan_gets_it_once_before_its_first_request(
    server_has_lifespan: bool,
) -> None:
    scopes: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope["type"])
        if scope["type"] == "lifespan":
            assert (await receive())["type"] == "lifespan.startup"
            await send({"type": "lifespan.startup.complete"})
            await receive()

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None: ...

    served = asgi.LifespanOnDemand(application)
    if server_has_lifespan:
        await served({"type": "lifespan"}, receive, send)
    for kind in ("http", "websocket", "http"):
        await served({"type": kind}, receive, send)
    assert scopes == ["lifespan", "http", "websocket", "http"]


async def test_a_lifespan_that_fails_is_tried_again_at_the_next_request() -> None:
    scopes: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope["type"])
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.failed"})

    async def nothing() -> Any: ...

    async def send(message: Any) -> None: ...

    served = asgi.LifespanOnDemand(application)
    for _ in range(2):
        await served({"type": "http"}, nothing, send)
    assert scopes == ["lifespan", "http"] * 2


@pytest.mark.parametrize("can_answer", [True, False])
async def test_a_websocket_to_a_path_that_isnt_there_gets_404(can_answer: bool) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    extensions = {"websocket.http.response": {}} if can_answer else {}
    scope = {"type": "websocket", "path": "/nowhere", "headers": [], "extensions": extensions}
    await asgi.unknown_websocket(scope, receive, send)
    if can_answer:
        assert [message.get("status") for message in sent] == [404, None]
    else:
        assert sent == [{"type": "websocket.close"}]
