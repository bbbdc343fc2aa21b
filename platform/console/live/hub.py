"""`Hub`: what a process's sockets have subscribed to, asked and heard once for all of them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import redis
from channels.layers import get_channel_layer
from django.db import DatabaseError, InterfaceError
from django.utils.module_loading import import_string

from common.db import run_in_db_thread
from common.errors import NotFound
from common.messaging import ALL_TENANTS, group_name
from engine.contract.errors import QuireError
from tenants.access import access_tenant
from tenants.actors import require_operator, to_actor
from tenants.models import User

# -- Every topic of the console's socket: the one place that registers them.


class Audience(Enum):
    """Who may have a topic."""

    #: A tenant's members have their tenant's; operators also all tenants'.
    TENANT = "tenant"
    #: The same for everybody who is logged in: nothing of a tenant may be in it.
    MEMBERS = "everybody"
    OPERATORS = "operators"


@dataclass(frozen=True)
class Topic:
    """One kind of news.

    Attributes:
        read: dotted name of a function from a tenant's id (`ALL_TENANTS`: of all) to what is so
        now, as
            plain JSON; asked every `poll_interval_s` seconds, in a thread, while somebody has the
            topic,
            and sent when it changed. "": only what `common.messaging.broadcast_sync` tells.
    """

    name: str
    audience: Audience
    read: str = ""
    poll_interval_s: float = 2.0


TOPICS = {
    topic.name: topic
    for topic in (
        # A new piece of history was written.
        Topic("history", Audience.MEMBERS),
        Topic("now", Audience.TENANT, "catalog.live_status.now"),
        # When the newest request that has ended began.
        Topic("requests", Audience.TENANT, "console.views.requests.latest_request_at"),
    )
}


def access_topic(user: User, name: str, tenant: str | None) -> tuple[Topic, int]:
    """The topic, and the id of the tenant it's for. Raises `NotFound`, `PermissionDenied`."""
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
#: Topic and id of the tenant.
Key = tuple[str, int]
Subscriber = Callable[[Key, Any], None]
#: With the query and the close this stays below 2 s.
POLL_INTERVAL_S = 1.5
AGAIN_AFTER_S = 5.0
#: What doesn't change is asked less often, up to so many times the pause.
SLOWEST = 3
#: Heartbeats that say the same as before are no news.
_WHEN = re.compile(rb'"at":[0-9.e+]+')
_encode_canonical = msgspec.json.Encoder(order="deterministic").encode


class Hub:
    """Sinks by key. A key's task and its group of the layer live as long as it has a sink."""

    def __init__(self) -> None:
        self._sinks: dict[Key, set[Subscriber]] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._last: dict[Key, Any] = {}

    def add(self, topic: Topic, tenant_id: int, sink: Subscriber) -> None:
        """Give the sink what is known now, and all news."""
        key = (topic.name, tenant_id)
        self._sinks.setdefault(key, set()).add(sink)
        if key in self._last:
            sink(key, self._last[key])
        task = self._tasks.get(key)
        loop = asyncio.get_running_loop()
        if task is None or task.done() or task.get_loop() is not loop:
            self._tasks[key] = loop.create_task(self._run_topic(topic, key))

    def remove(self, key: Key, sink: Subscriber) -> None:
        """No more of this."""
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
        following = [self._poll(topic, key)] if topic.read else [self._listen(key)]
        await asyncio.gather(*following)

    async def _listen(self, key: Key) -> None:
        """What other processes tell. While the layer is away, nothing comes."""
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
                await asyncio.sleep(AGAIN_AFTER_S)
            finally:
                with suppress(redis.RedisError, OSError):
                    await layer.group_discard(group_name(*key), channel)

    async def _poll(self, topic: Topic, key: Key) -> None:
        """What is so now, again and again, told when it changed."""
        read, before, wait = import_string(topic.read), b"", topic.poll_interval_s
        while True:
            try:
                data = await run_in_db_thread(read, key[1])
            except (QuireError, redis.RedisError, DatabaseError, InterfaceError) as error:
                logger.debug("%s can't be read: %s", topic.name, error)
                data = {"unknown": True}
            now = _WHEN.sub(b"", _encode_canonical(data))
            wait = min(wait * 1.5, topic.poll_interval_s * SLOWEST)
            if now != before:
                before, self._last[key], wait = now, data, topic.poll_interval_s
                self._deliver(key, data)
            await asyncio.sleep(wait)


class PermissionMonitor:
    """Looks again and again whether people still have the rights that their pages hang on."""

    def __init__(self) -> None:
        self._watched: dict[Callable[[], Awaitable[None]], tuple[int, set[int]]] = {}
        self._task: asyncio.Task[None] | None = None

    def watch(
        self, on_lost: Callable[[], Awaitable[None]], user_id: int, tenants: set[int]
    ) -> None:
        """Call `on_lost` when one of the tenants (0: all of them) isn't the user's any more."""
        if not tenants:
            self._watched.pop(on_lost, None)
            return
        self._watched[on_lost] = (user_id, tenants)
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._check_permissions())

    async def _check_permissions(self) -> None:
        while self._watched:
            await asyncio.sleep(POLL_INTERVAL_S)
            # Who comes during the look wasn't asked after, and has lost nothing.
            looked_at = dict(self._watched)
            try:
                allowed = await run_in_db_thread(_rights, {user for user, _ in looked_at.values()})
            except (DatabaseError, InterfaceError) as error:
                logger.warning("permission check of open sockets failed: %s", error)
                continue
            lost = [
                call
                for call, held in looked_at.items()
                if self._watched.get(call) == held and _misses(held[1], allowed[held[0]])
            ]
            for call in lost:
                self._watched.pop(call, None)
            await asyncio.gather(*(call() for call in lost), return_exceptions=True)


def _misses(tenants: set[int], allowed: set[int]) -> bool:
    """Whether one of these isn't allowed."""
    return 0 not in allowed and bool(tenants - allowed)


def _rights(users: set[int]) -> dict[int, set[int]]:
    """The tenants of each; 0 among them for operators."""
    found: dict[int, set[int]] = {user: set() for user in users}
    active = User.objects.filter(pk__in=users, is_active=True)
    for user, operator, tenant in active.values_list(
        "pk", "is_superuser", "memberships__tenant_id"
    ):
        if operator or tenant is not None:
            found[user].add(0 if operator else tenant)
    return found


hub = Hub()
rights = PermissionMonitor()
