"""A gateway with real pooling models behind it, in threads of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from catalog.models import DesiredState, ServedModel
from engine.contract.engine_config import EngineConfig
from engine.serving.service import EngineService
from inference.engine_client.client import get_engine_client
from tests.engine.pooling.models import make
from tests.inference.conftest import Gateway

Serve = Callable[..., AbstractAsyncContextManager[EngineService]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models by what they do."""
    root = tmp_path_factory.mktemp("pooling")
    kinds: dict[str, dict[str, Any]] = {
        "embed": {"matryoshka_dimensions": [8, 16]},
        "classify": {"head": "ForSequenceClassification", "num_labels": 3},
        "rank": {"head": "ForSequenceClassification", "num_labels": 1},
    }
    return {name: make("bert", root / name, **options) for name, options in kinds.items()}


@pytest.fixture
def serve(gateway: Gateway, folders: dict[str, Path]) -> Serve:
    """`async with serve("embed"): ...` puts that model behind the gateway, under that name."""

    @asynccontextmanager
    async def serving(name: str, **options: Any) -> AsyncIterator[EngineService]:
        await asyncio.to_thread(
            ServedModel.objects.get_or_create,
            name=name,
            defaults={
                "source": name,
                "desired_state": DesiredState.LOADED,
                "managed": False,
            },
        )
        config = EngineConfig(
            model=str(folders[name]), served_model_name=name, max_model_len=64, **options
        )
        client = redis.Redis.from_url(gateway.redis_url)
        service = EngineService(config, f"{name}-replica", client, gateway.prefix)
        thread = threading.Thread(target=service.run, args=(5.0,))
        thread.start()
        try:
            await _wait_until_registered(gateway, name)
            yield service
        finally:
            service.drain()
            await asyncio.to_thread(thread.join, 20)
            client.close()

    return serving


async def _wait_until_registered(gateway: Gateway, name: str) -> None:
    """Until the gateway has heard that the model's replica is ready."""
    for _ in range(200):
        await gateway.refresh()
        if any(replica.ready for replica in get_engine_client().fleet.of_model(name)):
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{name} isn't ready")
