"""Start and end of a gateway process: the engine client, tracing and the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from functools import partial

from django.conf import settings

from adapters.resolvers import lora_resolvers
from common.loops import keep_running
from inference.edge.handler import Send
from inference.engine_client.client import close_engine_client, get_engine_client
from inference.generation import background
from inference.tracing import close_tracing, tracing
from inference.web.views import Receive, Scope

logger = logging.getLogger(__name__)

#: Looks at the newest objects before what is left of them is looked through again: some two
#: minutes while 250 streams run. Every few seconds one request in a hundred stood still for it.
GEN1_THRESHOLD = 20_000
#: So many, and it's done in the next quiet moment.
OLDER_WHEN_IDLE_AFTER = 10
IDLE_CHECK_INTERVAL_S = 5.0
#: Nobody waits for so long before a moment is a quiet one: many clients' answers may end together,
#: and they ask again at once.
IDLE_S = 0.25


def set_gc_thresholds(threshold: int) -> None:
    """Collect new objects when there are `threshold` more, and never what was loaded so far;
    0 leaves the collector as Python has it.

    Python's own thresholds cost a tenth of the event loop's time, and with a threshold of 10,000
    all of 250 running streams stand still for 20 to 56 ms. Requests leave hardly any cycles.
    """
    if threshold:
        gc.collect()
        gc.freeze()
        gc.set_threshold(threshold, GEN1_THRESHOLD, gc.get_threshold()[2])


async def collect_when_idle(is_idle: Callable[[], bool]) -> None:
    """For ever: look through all that isn't frozen while there's nobody to wait for it."""
    while True:
        await asyncio.sleep(IDLE_CHECK_INTERVAL_S)
        if gc.get_count()[1] < OLDER_WHEN_IDLE_AFTER or not is_idle():
            continue
        await asyncio.sleep(IDLE_S)
        if is_idle():
            gc.collect()


#: How long a server that stops waits for the usage of what it served.
SHUTDOWN_TIMEOUT_S = 5.0


async def lifespan(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI's lifespan: the engine client starts with the server and is closed with it."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            try:
                tracing()  # refuses an endpoint that is none
                lora_resolvers()  # refuses a package that can't be loaded
                client = get_engine_client()
                await client.start()
                set_gc_thresholds(settings.QUIRE.gc_threshold)
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
