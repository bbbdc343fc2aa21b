"""Topics of the console's WebSocket: who may subscribe, and which gateway polls their data."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import msgspec
import redis
from django.db import DatabaseError, InterfaceError
from django.utils.module_loading import import_string

from common.db import run_in_db_thread
from common.errors import NotFound
from common.locks import hold_lock
from common.loops import keep_running
from common.messaging import ALL_TENANTS, send_to_group
from engine.contract.errors import QuireError
from metering.redis_scripts import redis_key, redis_link
from tenants.access import access_tenant
from tenants.actors import require_operator
from tenants.models import User


class Audience(Enum):
    """The users who may subscribe to a topic."""

    #: Members see their tenant's data; operators may also subscribe to all tenants.
    TENANT = "tenant"
    #: Every logged-in user, so the data must not contain anything about a tenant.
    MEMBERS = "everybody"
    OPERATORS = "operators"


@dataclass(frozen=True)
class Topic:
    """A subscription that pages may request.

    Attributes:
        read: dotted name of a function from a tenant's id (or `ALL_TENANTS`) to the current data
            as plain JSON, which pages get when they subscribe. "": pages get `{}` and fetch the
            data themselves.
        interval_s: seconds between reads of the topic by one gateway while a page subscribes to it;
            changes are sent. 0: code that changes the data sends it with
            `common.messaging.broadcast_sync`.
    """

    name: str
    audience: Audience
    read: str = ""
    interval_s: float = 0.0


TOPICS = {
    topic.name: topic
    for topic in (
        # A new interval of the traffic history was recorded.
        Topic("history", Audience.MEMBERS, "history.read.latest"),
        Topic("now", Audience.TENANT, "catalog.live_status.now", interval_s=2.0),
        # Start time of the newest finished request.
        Topic("requests", Audience.TENANT, "console.views.requests.latest_request_at"),
        Topic("adapters", Audience.TENANT, "console.views.adapters.residency_topic", 2.0),
        # A batch has changed.
        Topic("batches", Audience.TENANT),
    )
}


def access_topic(user: User, name: str, tenant: str | None) -> tuple[Topic, int]:
    """Return the topic and the tenant's id. Raises: `NotFound`, `PermissionDenied`."""
    topic = TOPICS.get(name)
    if topic is None:
        raise NotFound(f"Topic {name[:50]!r} not found.", param="topic")
    if topic.audience is Audience.MEMBERS:
        return topic, ALL_TENANTS
    if topic.audience is Audience.OPERATORS or tenant is None:
        require_operator(user)
        return topic, ALL_TENANTS
    return topic, access_tenant(user, tenant).pk


logger = logging.getLogger(__name__)
#: Topic name and tenant id.
Key = tuple[str, int]
#: Including the query and the close, a lost permission takes effect within 2 s.
POLL_INTERVAL_S = 1.5
#: Timestamps, which comparisons of data ignore.
_TIMESTAMPS = re.compile(rb'"at":[0-9.e+]+')
_encode_canonical = msgspec.json.Encoder(order="deterministic").encode


async def read_topic(topic: Topic, tenant_id: int) -> dict[str, Any]:
    """Return the topic's current data; `{"unknown": True}` if it can't be read."""
    if not topic.read:
        return {}
    try:
        data: dict[str, Any] = await run_in_db_thread(import_string(topic.read), tenant_id)
    except (QuireError, redis.RedisError, DatabaseError, InterfaceError) as error:
        logger.debug("%s can't be read: %s", topic.name, error)
        return {"unknown": True}
    return data


class Leader:
    """Polls topics whose changes aren't pushed, for the sockets of all gateways.

    Each gateway with subscribers of such a topic tries to take the topic's lock in Redis. The
    holder polls the topic and sends changes to its group.
    """

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._sockets: dict[Key, set[object]] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def add(self, topic: Topic, key: Key, socket: object) -> None:
        if not topic.interval_s:
            return
        self._sockets.setdefault(key, set()).add(socket)
        task, loop = self._tasks.get(key), asyncio.get_running_loop()
        if task is None or task.done() or task.get_loop() is not loop:
            publish = partial(self._publish, topic, key)
            self._tasks[key] = loop.create_task(keep_running(f"topic {topic.name}", publish))

    def remove(self, key: Key, socket: object) -> None:
        sockets = self._sockets.get(key, set())
        sockets.discard(socket)
        if not sockets:
            self._sockets.pop(key, None)
            if task := self._tasks.pop(key, None):
                task.cancel()

    async def _publish(self, topic: Topic, key: Key) -> None:
        last_encoded = b""
        lock, lifetime_s = redis_key(f"live:{topic.name}:{key[1]}"), 2.5 * topic.interval_s
        while True:
            await asyncio.sleep(topic.interval_s)
            try:
                if not await hold_lock(redis_link(), lock, self._id, lifetime_s):
                    last_encoded = b""
                    continue
                data = await read_topic(topic, key[1])
                encoded = _TIMESTAMPS.sub(b"", _encode_canonical(data))
                if encoded != last_encoded:
                    await send_to_group(topic.name, key[1], data)
                    last_encoded = encoded
            except (redis.RedisError, OSError) as error:
                logger.debug("no news of %s: %s", topic.name, error)
                last_encoded = b""


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
    """Return whether one of `tenants` isn't allowed."""
    return 0 not in allowed and bool(tenants - allowed)


def _allowed_tenants(users: set[int]) -> dict[int, set[int]]:
    """User id -> ids of accessible tenants; operators have 0, which stands for all tenants."""
    tenants: dict[int, set[int]] = {user: set() for user in users}
    active = User.objects.filter(pk__in=users, is_active=True)
    for user, operator, tenant in active.values_list(
        "pk", "is_superuser", "memberships__tenant_id"
    ):
        if operator or tenant is not None:
            tenants[user].add(0 if operator else tenant)
    return tenants


leader = Leader()
rights = PermissionMonitor()
