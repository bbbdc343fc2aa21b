"""Startup and shutdown of a gateway process: the engine client, tracing, garbage collection."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from functools import partial

from adapters.resolvers import lora_resolvers
from common.loops import keep_running
from inference.edge.handler import Send
from inference.engine_client.client import close_engine_client, get_engine_client
from inference.generation import background
from inference.tracing import close_tracing, tracing
from inference.web.views import Receive, Scope

logger = logging.getLogger(__name__)

#: New objects before the newest generation is collected: the pause of a collection grows with them.
GEN0_THRESHOLD = 1_000
#: Collections of the newest generation before the next older one is collected: about two minutes
#: while 250 streams run. At every few seconds, it delayed one request in a hundred.
GEN1_THRESHOLD = 20_000
#: After so many of them, the older generations are collected at the next idle moment.
OLDER_WHEN_IDLE_AFTER = 10
IDLE_CHECK_INTERVAL_S = 5.0
#: Seconds without requests before the process counts as idle: many responses may end together, and
#: their clients send the next requests at once.
IDLE_S = 0.25


def set_gc_thresholds() -> None:
    """Collect the newest generation after `GEN0_THRESHOLD` new objects, and exclude the objects
    loaded so far.

    Python's own thresholds cost a tenth of the event loop's time, and with a threshold of 10,000
    all of 250 running streams pause for 20 to 56 ms. Requests leave hardly any cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GEN0_THRESHOLD, GEN1_THRESHOLD, gc.get_threshold()[2])


async def collect_when_idle(is_idle: Callable[[], bool]) -> None:
    """Forever: collect all objects that aren't frozen while no request is open."""
    while True:
        await asyncio.sleep(IDLE_CHECK_INTERVAL_S)
        if gc.get_count()[1] < OLDER_WHEN_IDLE_AFTER or not is_idle():
            continue
        await asyncio.sleep(IDLE_S)
        if is_idle():
            gc.collect()


#: Seconds that a stopping server waits until the usage of its requests is settled.
SHUTDOWN_TIMEOUT_S = 5.0


async def lifespan(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI's lifespan: start the engine client with the server, and close it at shutdown."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            try:
                tracing()  # raises for an invalid endpoint
                lora_resolvers()  # raises for a package that can't be loaded
                client = get_engine_client()
                await client.start()
                set_gc_thresholds()
                collect = partial(collect_when_idle, client.is_idle)
                client.spawn(keep_running("idle garbage collection", collect))
            except Exception as error:
                logger.exception("The engine client did not start.")
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await close_engine_client()
            await background.drain(SHUTDOWN_TIMEOUT_S)
            await asyncio.to_thread(close_tracing)
            await send({"type": "lifespan.shutdown.complete"})
            return
