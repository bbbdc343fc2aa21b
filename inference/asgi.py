"""ASGI for the data plane: Django's handler without what an API request doesn't need.

Django's stock handler spools the body without a limit, fires request signals and runs each
synchronous middleware in a thread: 2-4 ms a request on two cores, `docs/gateway.md` has the
figures. This one resolves the same URLs to the same views, reads the body within limits, and
cancels the view when the client goes away. It fires no request signals, so code below it that uses
the ORM does so through `channels.db.database_sync_to_async`, which closes stale connections.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from django.conf import settings
from django.urls.base import set_script_prefix

from adapters.resolvers import lora_resolvers
from common.log_context import end_request
from common.loops import keep_running
from inference.edge.body import BodyLimitMiddleware
from inference.edge.handler import GatewayHandler, Send, gateway_path, is_gateway_path
from inference.edge.request_log import RequestLog
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


Application = Callable[[Scope, Receive, Send], Awaitable[None]]
#: How long a server that stops waits for the usage of what it served.
SHUTDOWN_TIMEOUT_S = 5.0


def http_application(django_application: Application) -> Application:
    """The API to `GatewayHandler`, everything else to Django's own handler."""
    gateway, pages = GatewayHandler(), BodyLimitMiddleware(django_application)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        set_script_prefix(scope.get("root_path", "") or "/")
        end_request()  # a server may begin a request in the task of the connection's last one
        of_api, exchange = is_gateway_path(scope), RequestLog(scope, send)
        try:
            if of_api:
                await gateway(scope, receive, exchange.send)
            else:
                await pages(scope, receive, exchange.send, gateway_path(scope))
        finally:
            exchange.log_completed(of_api=of_api)

    return application


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
