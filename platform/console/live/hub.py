"""Topics of the console's WebSocket and the `Hub` that reads each once for all sockets."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import msgspec
import redis
from channels.layers import get_channel_layer
from django.db import DatabaseError, InterfaceError
from django.utils.module_loading import import_string

from common.db import run_in_db_thread
from common.errors import NotFound
from common.loops import keep_running
from common.messaging import ALL_TENANTS, group_name
from engine.contract.errors import QuireError
from tenants.access import access_tenant
from tenants.actors import require_operator, to_actor
from tenants.models import User


class Audience(Enum):
    """The users who may subscribe to a topic."""

    #: Members, for their tenant; operators also for all tenants.
    TENANT = "tenant"
    #: Every logged-in user: the data must not contain anything of a tenant.
    MEMBERS = "everybody"
    OPERATORS = "operators"


@dataclass(frozen=True)
class Topic:
    """A subscription that pages may request.

    Attributes:
        read: dotted name of a function from a tenant's id (or `ALL_TENANTS`) to the current data
            as plain JSON. While the topic has subscribers, it's called in a thread every
            `poll_interval_s` seconds, and the data is sent if it changed. "": only messages of
            `common.messaging.broadcast_sync`.
    """

    name: str
    audience: Audience
    read: str = ""
    poll_interval_s: float = 2.0


TOPICS = {
    topic.name: topic
    for topic in (
        # A new interval of the traffic history was written.
        Topic("history", Audience.MEMBERS),
        Topic("now", Audience.TENANT, "catalog.live_status.now"),
        # Start of the newest finished request.
        Topic("requests", Audience.TENANT, "console.views.requests.latest_request_at"),
    )
}


def access_topic(user: User, name: str, tenant: str | None) -> tuple[Topic, int]:
    """The topic and the tenant's id. Raises: `NotFound`, `PermissionDenied`."""
    topic = TOPICS.get(name)
    if topic is None:
        raise NotFound(f"Topic {name[:50]!r} not found.", param="topic")
    if topic.audience is Audience.MEMBERS:
        return topic, ALL_TENANTS
    if topic.audience is Audience.OPERATORS or tenant is None:
        require_operator(to_actor(user))
        return topic, ALL_TENANTS
    return topic, access_tenant(user, tenant).pk


logger = logging.getLogger(__name__)
#: Topic name and tenant id.
Key = tuple[str, int]
Subscriber = Callable[[Key, Any], None]
#: Together with the query and the close, a lost permission takes effect within 2 s.
POLL_INTERVAL_S = 1.5
RETRY_INTERVAL_S = 5.0
#: Maximum factor by which polling of unchanged data slows down.
MAX_BACKOFF = 3
#: Timestamps, ignored when data is compared.
_TIMESTAMPS = re.compile(rb'"at":[0-9.e+]+')
_encode_canonical = msgspec.json.Encoder(order="deterministic").encode


class Hub:
    """Subscribers by key. A key's task and channel-layer group exist while it has subscribers."""

    def __init__(self) -> None:
        self._sinks: dict[Key, set[Subscriber]] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._last: dict[Key, Any] = {}

    def add(self, topic: Topic, tenant_id: int, sink: Subscriber) -> None:
        """Subscribe `sink`: it gets the last data at once, then every change."""
        key = (topic.name, tenant_id)
        self._sinks.setdefault(key, set()).add(sink)
        if key in self._last:
            sink(key, self._last[key])
        task = self._tasks.get(key)
        loop = asyncio.get_running_loop()
        if task is None or task.done() or task.get_loop() is not loop:
            self._tasks[key] = loop.create_task(
                keep_running(f"topic {topic.name}", partial(self._run_topic, topic, key))
            )

    def remove(self, key: Key, sink: Subscriber) -> None:
        """Unsubscribe `sink`."""
        sinks = self._sinks.get(key, set())
        sinks.discard(sink)
        if not sinks:
            self._sinks.pop(key, None)
            self._last.pop(key, None)
            if task := self._tasks.pop(key, None):
                task.cancel()

    def _deliver(self, key: Key, data: Any) -> None:
        for sink in tuple(self._sinks.get(key, ())):
            sink(key, data)

    async def _run_topic(self, topic: Topic, key: Key) -> None:
        await (self._poll(topic, key) if topic.read else self._listen(key))

    async def _listen(self, key: Key) -> None:
        """Deliver messages of the channel layer; reconnect after errors."""
        layer: Any = get_channel_layer()
        while True:
            channel = await layer.new_channel()
            try:
                await layer.group_add(group_name(*key), channel)
                while True:
                    message = await layer.receive(channel)
                    self._deliver(key, message["data"])
            except (redis.RedisError, OSError) as error:
                logger.warning("no news of %s: %s", key[0], error)
                await asyncio.sleep(RETRY_INTERVAL_S)
            finally:
                with suppress(redis.RedisError, OSError):
                    await layer.group_discard(group_name(*key), channel)

    async def _poll(self, topic: Topic, key: Key) -> None:
        """Read the topic periodically and deliver its data when it changes."""
        read, last_encoded, wait = import_string(topic.read), b"", topic.poll_interval_s
        while True:
            try:
                data = await run_in_db_thread(read, key[1])
            except (QuireError, redis.RedisError, DatabaseError, InterfaceError) as error:
                logger.debug("%s can't be read: %s", topic.name, error)
                data = {"unknown": True}
            encoded = _TIMESTAMPS.sub(b"", _encode_canonical(data))
            wait = min(wait * 1.5, topic.poll_interval_s * MAX_BACKOFF)
            if encoded != last_encoded:
                last_encoded, self._last[key], wait = encoded, data, topic.poll_interval_s
                self._deliver(key, data)
            await asyncio.sleep(wait)


class PermissionMonitor:
    """Checks periodically whether users still have access to the tenants of their open sockets."""

    def __init__(self) -> None:
        self._watched: dict[Callable[[], Awaitable[None]], tuple[int, set[int]]] = {}
        self._task: asyncio.Task[None] | None = None

    def watch(
        self, on_lost: Callable[[], Awaitable[None]], user_id: int, tenants: set[int]
    ) -> None:
        """Call `on_lost` when the user loses access to one of `tenants` (0: all tenants)."""
        if not tenants:
            self._watched.pop(on_lost, None)
            return
        self._watched[on_lost] = (user_id, tenants)
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(keep_running("permissions", self._check_permissions))

    async def _check_permissions(self) -> None:
        while self._watched:
            await asyncio.sleep(POLL_INTERVAL_S)
            # Sockets added during the query aren't part of its result.
            checked = dict(self._watched)
            try:
                allowed = await run_in_db_thread(
                    _allowed_tenants, {user for user, _ in checked.values()}
                )
            except (DatabaseError, InterfaceError) as error:
                logger.warning("permission check of open sockets failed: %s", error)
                continue
            lost = [
                call
                for call, watched in checked.items()
                if self._watched.get(call) == watched
                and _has_lost_access(watched[1], allowed[watched[0]])
            ]
            for call in lost:
                self._watched.pop(call, None)
            await asyncio.gather(*(call() for call in lost), return_exceptions=True)


def _has_lost_access(tenants: set[int], allowed: set[int]) -> bool:
    """Whether one of `tenants` isn't allowed."""
    return 0 not in allowed and bool(tenants - allowed)


def _allowed_tenants(users: set[int]) -> dict[int, set[int]]:
    """Tenant ids by user id; 0 stands for all, for operators."""
    tenants: dict[int, set[int]] = {user: set() for user in users}
    active = User.objects.filter(pk__in=users, is_active=True)
    for user, operator, tenant in active.values_list(
        "pk", "is_superuser", "memberships__tenant_id"
    ):
        if operator or tenant is not None:
            tenants[user].add(0 if operator else tenant)
    return tenants


hub = Hub()
rights = PermissionMonitor()
