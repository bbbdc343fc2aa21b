"""The ASGI application: API, pages, WebSockets, and a gateway process's background tasks."""

# ruff: noqa: E402 - Django must be set up before its apps are imported

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

from django.core.asgi import get_asgi_application

django_application = get_asgi_application()

from django.db import connection

from engine.system.light_imports import import_blocking

if connection.vendor != "postgresql":  # keeps DRF from importing its PostgreSQL fields
    import_blocking("rest_framework.compat", "psycopg")

# Start it now rather than when the first request hands work to a thread.
from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from django.core.cache import caches
from django.db import DatabaseError, InterfaceError
from django.urls import get_resolver, re_path
from django_prometheus.migrations import ExportMigrations

import config.celery  # noqa: F401
import console.routing
import inference.routing
import kv_map.routing
from common.db import run_in_db_thread
from inference.edge.handler import URLCONF, http_application
from inference.edge.request_log import count_websockets
from inference.lifespan import lifespan as gateway_lifespan
from metering.drain import start_drainer, stop_drainer
from metering.gateway_recovery import start_gateway_heartbeat, stop_keeper
from metering.request_log_writer import start_writer, stop_writer

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
logger = logging.getLogger(__name__)


def load_views() -> None:
    """Import the views of the API and the pages before the first request arrives.

    Django would import them during the first request. That takes half a second, during which
    streams that reconnect to a restarted process would stall.
    """
    for urlconf in (URLCONF, None):
        get_resolver(urlconf).url_patterns  # noqa: B018 - reading the attribute imports the views
    caches["default"]  # so that `/metrics` has the cache's counters from the start


async def export_migrations() -> None:
    """Export the number of unapplied migrations to `/metrics`."""
    try:
        await run_in_db_thread(ExportMigrations)
    except (DatabaseError, InterfaceError) as error:
        logger.warning("migrations can't be counted: %s", error)


async def lifespan(scope: Message, receive: Receive, send: Send) -> None:
    """Run a gateway process's background tasks: each process helps to move usage from the spool
    into the ledger, and sends a heartbeat. When heartbeats stop, other gateways settle the usage
    that the process left behind."""
    load_views()
    migrations = asyncio.create_task(export_migrations())
    start_drainer()
    start_gateway_heartbeat()
    start_writer()
    try:
        await gateway_lifespan(scope, receive, send)
    finally:
        migrations.cancel()
        await asyncio.to_thread(stop_keeper)
        await stop_drainer()
        await asyncio.to_thread(stop_writer)


class LifespanOnDemand:
    """Starts the lifespan before the first request if the server doesn't support it (daphne)."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._server_has_lifespan = False
        self._starting: asyncio.Task[None] | None = None
        self._lifespan: asyncio.Task[None] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._server_has_lifespan = True
        elif not self._server_has_lifespan:
            if self._starting is None:
                self._starting = asyncio.create_task(self._start())
            await asyncio.shield(self._starting)
        await self._application(scope, receive, send)

    async def _start(self) -> None:
        started = asyncio.Event()
        messages: list[Message] = [{"type": "lifespan.startup"}]

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()  # the lifespan lasts as long as the process
            return messages.pop()

        async def send(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                self._starting = None  # the next request tries again
            started.set()

        run = self._application({"type": "lifespan"}, receive, send)
        self._lifespan = asyncio.ensure_future(run)
        await started.wait()


async def unknown_websocket(scope: Message, receive: Receive, send: Send) -> None:
    """Answer 404 to a WebSocket on an unknown path, or refuse the handshake where the server can't
    send an HTTP response."""
    await receive()
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "websocket.http.response.start", "status": 404, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": b"Not found.\n"})


application = LifespanOnDemand(
    ProtocolTypeRouter(
        {
            "http": http_application(cast(Any, django_application)),
            # Consumers check the origin themselves and close with a code that the page
            # understands. Channels' validator would refuse the handshake without a reason.
            "websocket": count_websockets(
                AuthMiddlewareStack(
                    URLRouter(
                        [
                            *inference.routing.websocket_urlpatterns,
                            *console.routing.websocket_urlpatterns,
                            *kv_map.routing.websocket_urlpatterns,
                            re_path("", cast(Any, unknown_websocket)),
                        ]
                    )
                )
            ),
            "lifespan": lifespan,
        }
    )
)
