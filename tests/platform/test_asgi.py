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
