"""The engine client of the running event loop."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from inference.engine_client.client import EngineClient

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, EngineClient] = WeakKeyDictionary()


def get_engine_client() -> EngineClient:
    """The client of this loop, made at the first call. `await client.start()` before use."""
    loop = asyncio.get_running_loop()
    client = _clients.get(loop)
    if client is None:
        client = _clients[loop] = EngineClient()
    return client


async def close_engine_client() -> None:
    """Close this loop's client, if it has one."""
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.close()
