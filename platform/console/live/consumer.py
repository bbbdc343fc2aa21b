"""`ConsoleConsumer`: the pages' WebSocket, `/ws/console/`. docs/console.md describes its frames."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import redis
from channels.db import database_sync_to_async

from common.messaging import group_name
from console.live.hub import Key, Topic, access_topic, leader, read_topic, rights
from engine.contract.errors import InvalidRequest, QuireError
from inference.errors import envelope
from inference.web.session_consumer import SessionConsumer

logger = logging.getLogger(__name__)

MAX_TOPICS = 32
#: Seconds without a message after which a socket checks the channel layer. While the layer is down,
#: pages get the current data at this interval.
CHECK_LAYER_S = 15.0
LAYER_ERRORS = (redis.RedisError, OSError)
TopicRequests = list[tuple[str, str | None]]


class ConsoleConsumer(SessionConsumer):
    """One browser's socket: sends the current data of each subscribed topic, then its updates.

    Only the newest unsent data of each subscription is buffered.
    """

    channel_layer_alias = "default"
    channel_layer: Any
    channel_name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._topics: dict[Key, Topic] = {}
        #: Tenant names that the page used for each key.
        self._names: dict[Key, list[str | None]] = {}
        self._pending: dict[Key, Any] = {}
        self._waiting = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._layer_failed = False

    async def on_open(self) -> None:
        self._writer = asyncio.create_task(self._write())

    async def on_close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
        await self._replace_topics({}, {})

    async def end_session(self) -> None:
        await self._replace_topics({}, {})
        await super().end_session()

    async def receive_json(self, content: dict[str, Any], **kwargs: Any) -> None:
        if content.get("type") == "ping":
            await self.send_json({"type": "pong"})
        elif content.get("type") == "want":
            await self._subscribe(_parse_topics(content))
        else:
            raise InvalidRequest("type must be 'want' or 'ping'.", param="type")

    async def _subscribe(self, requested: TopicRequests) -> None:
        """Replace the subscriptions with `requested`."""
        topics: dict[Key, Topic] = {}
        names: dict[Key, list[str | None]] = {}
        for name, tenant in requested:
            try:
                topic, tenant_id = await database_sync_to_async(access_topic)(
                    self.user, name, tenant
                )
            except QuireError as error:
                refused = {"type": "refused", "topic": name, "tenant": tenant}
                await self.send_json({**refused, **envelope(error)})
                continue
            topics[name, tenant_id] = topic
            names.setdefault((name, tenant_id), []).append(tenant)
        if self.user is None:
            return  # the session ended in the meantime
        added = topics.keys() - self._topics.keys()
        await self._replace_topics(topics, names)
        await self._read_topics(added)

    async def _replace_topics(
        self, topics: dict[Key, Topic], names: dict[Key, list[str | None]]
    ) -> None:
        """Join the groups of `topics`; leave those of all other topics."""
        previous, self._topics, self._names = self._topics, topics, names
        # Topics for every user need no permission checks.
        tenants = {key[1] for key in topics if topics[key].audience.value != "everybody"}
        rights.watch(self.end_session, self.user.pk if self.user else 0, tenants)
        for key in previous.keys() - topics.keys():
            self._pending.pop(key, None)
            leader.remove(key, self)
            await self._with_layer("group_discard", group_name(*key))
        for key in topics.keys() - previous.keys():
            await self._with_layer("group_add", group_name(*key))
            leader.add(topics[key], key, self)

    async def _with_layer(self, method: str, group: str) -> None:
        try:
            await getattr(self.channel_layer, method)(group, self.channel_name)
        except LAYER_ERRORS as error:
            logger.debug("%s %s: %s", method, group, error)
            self._layer_failed = True

    async def live(self, message: dict[str, Any]) -> None:
        """Receive a group's message: an update of a topic."""
        self._store_pending((message["topic"], message["tenant_id"]), message["data"])

    async def live_check(self, message: dict[str, Any]) -> None:
        """Receive the probe that `_check_layer` sends."""

    def _store_pending(self, key: Key, data: Any) -> None:
        if key in self._names:
            self._pending[key] = data
            self._waiting.set()

    async def _read_topics(self, keys: Any) -> None:
        """Read the current data of the topics and queue it for sending."""
        for key in keys:
            if (topic := self._topics.get(key)) is not None:
                self._store_pending(key, await read_topic(topic, key[1]))

    async def _write(self) -> None:
        """Send pending data; while a slow client reads a frame, newer data replaces older data."""
        while True:
            try:
                async with asyncio.timeout(CHECK_LAYER_S):
                    await self._waiting.wait()
            except TimeoutError:
                await self._check_layer()
                continue
            self._waiting.clear()
            while self._pending:
                key = next(iter(self._pending))
                data = self._pending.pop(key)
                for tenant in self._names.get(key, ()):
                    frame = {"type": "data", "topic": key[0], "tenant": tenant, "data": data}
                    await self.send_json(frame)

    async def _check_layer(self) -> None:
        """Probe the layer; read the topics while it's down and once it's back, as updates were
        missed.
        """
        previously_failed, self._layer_failed = self._layer_failed, False
        try:
            for key in self._topics:  # join again: earlier attempts may have failed
                await self.channel_layer.group_add(group_name(*key), self.channel_name)
            await self.channel_layer.send(self.channel_name, {"type": "live.check"})
        except LAYER_ERRORS as error:
            logger.debug("the channel layer is down: %s", error)
            self._layer_failed = True
        if previously_failed or self._layer_failed:
            await self._read_topics(list(self._topics))


def _parse_topics(message: dict[str, Any]) -> TopicRequests:
    """Parse pairs of a topic and a tenant's slug (None: all tenants). Raises `InvalidRequest`."""
    topics = message.get("topics")
    if not isinstance(topics, list) or len(topics) > MAX_TOPICS:
        raise InvalidRequest(f"topics must be a list of {MAX_TOPICS} at most.", param="topics")
    pairs: TopicRequests = []
    for pair in topics:
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidRequest("A topic is a pair of its name and a tenant.", param="topics")
        name, tenant = pair
        if not isinstance(name, str) or not isinstance(tenant, str | None):
            raise InvalidRequest("A topic's name and tenant are words.", param="topics")
        pairs.append((name, tenant))
    return pairs
