"""`ConsoleConsumer`: the pages' WebSocket, `/ws/console/`. docs/console.md has its frames."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer

from console.live.hub import Key, access_topic, hub, rights
from engine.contract.errors import InvalidRequest, QuireError
from inference.errors import envelope
from inference.web.json_body import parse_object
from tenants.sessions import snapshot_session
from tenants.websockets import (
    BAD_MESSAGES,
    FOREIGN_ORIGIN,
    NOT_LOGGED_IN,
    origin_allowed,
    session_monitor,
    user_of_session,
)

MAX_FRAME_CHARS = 1 << 14
MAX_DEPTH = 8
MAX_TOPICS = 32
MAX_BAD_FRAMES = 5
_encode = msgspec.json.Encoder().encode
TopicRequests = list[tuple[str, str | None]]


class ConsoleConsumer(AsyncWebsocketConsumer):
    """One browser. Only the newest unsent data of each subscription is buffered."""

    # The hub listens to the channel layer, once for all sockets of the process.
    channel_layer_alias = "none"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._user: Any = None
        self._bad_frames = 0
        #: Tenant names that the page used for each key.
        self._names: dict[Key, list[str | None]] = {}
        self._pending: dict[Key, Any] = {}
        self._waiting = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Accept, so that a refusal can carry a close code that the page understands."""
        await self.accept()
        if not origin_allowed(dict(self.scope["headers"])):
            await self.close(FOREIGN_ORIGIN)
            return
        session = self.scope.get("session")
        self._user = await user_of_session(session.session_key if session is not None else None)
        if self._user is None:
            await self.close(NOT_LOGGED_IN)
            return
        session_monitor.add(snapshot_session(session.session_key, self._user), self._on_access_lost)
        self._writer = asyncio.create_task(self._write())

    async def disconnect(self, code: int) -> None:
        """End all subscriptions."""
        session_monitor.remove(self._on_access_lost)
        self._unsubscribe_all()
        if self._writer is not None:
            self._writer.cancel()

    async def _on_access_lost(self) -> None:
        """Close after the session ended or access to a subscribed tenant was lost."""
        self._user = None
        self._unsubscribe_all()
        await self.close(NOT_LOGGED_IN)

    def _unsubscribe_all(self) -> None:
        rights.watch(self._on_access_lost, 0, set())
        for key in self._names:
            hub.remove(key, self._sink)
        self._names, self._pending = {}, {}

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Handle one frame."""
        if text_data is None or len(text_data) > MAX_FRAME_CHARS:
            await self.close(BAD_MESSAGES)
            return
        if self._user is None:
            return  # already closing
        try:
            message = parse_object(text_data.encode("utf-8", "surrogatepass"), MAX_DEPTH)
            if message.get("type") == "ping":
                await self._send({"type": "pong"})
            elif message.get("type") == "want":
                await self._subscribe(_parse_topics(message))
            else:
                raise InvalidRequest("type must be 'want' or 'ping'.", param="type")
        except QuireError as error:
            self._bad_frames += 1
            await self._send({"type": "error", **envelope(error)})
            if self._bad_frames >= MAX_BAD_FRAMES:
                await self.close(BAD_MESSAGES)

    async def _subscribe(self, requested: TopicRequests) -> None:
        """Replace the subscriptions with `requested`."""
        topics: dict[Key, Any] = {}
        names: dict[Key, list[str | None]] = {}
        for name, tenant in requested:
            try:
                topic, tenant_id = await database_sync_to_async(access_topic)(
                    self._user, name, tenant
                )
            except QuireError as error:
                refused = {"type": "refused", "topic": name, "tenant": tenant}
                await self._send({**refused, **envelope(error)})
                continue
            topics[name, tenant_id] = topic
            names.setdefault((name, tenant_id), []).append(tenant)
        if self._user is None:
            return  # the session ended meanwhile
        previous = set(self._names)
        self._names = names
        for key in previous - set(topics):
            hub.remove(key, self._sink)
            self._pending.pop(key, None)
        for key in set(topics) - previous:
            hub.add(topics[key], key[1], self._sink)
        # Topics for everybody need no permission.
        tenants = {key[1] for key in topics if topics[key].audience.value != "everybody"}
        rights.watch(self._on_access_lost, self._user.pk, tenants)

    def _sink(self, key: Key, data: Any) -> None:
        self._pending[key] = data
        self._waiting.set()

    async def _write(self) -> None:
        """Send pending data; while a slow reader takes a frame, newer data replaces older."""
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            while self._pending:
                key = next(iter(self._pending))
                data = self._pending.pop(key)
                for tenant in self._names.get(key, ()):
                    frame = {"type": "data", "topic": key[0], "tenant": tenant, "data": data}
                    await self._send(frame)

    async def _send(self, frame: dict[str, Any]) -> None:
        await self.send(text_data=_encode(frame).decode())


def _parse_topics(message: dict[str, Any]) -> TopicRequests:
    """Pairs of a topic and a tenant's slug (None: all). Raises: `InvalidRequest`."""
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
