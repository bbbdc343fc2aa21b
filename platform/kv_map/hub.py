"""Subscribes to replicas' block maps, once per process and replica, for all viewers.

A replica publishes its blocks only while `watch_key` exists, and the key is renewed only while
there are viewers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec
from django.conf import settings
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.loops import keep_running
from engine.contract.replica_state import (
    WATCH_TTL_S,
    KVMapFrame,
    decode_frame,
    frames_key,
    watch_key,
)
from engine.system.redis_client import async_client
from kv_map.state import Cells, Mirror, cells_of

logger = logging.getLogger(__name__)

RENEW_S = 2.0
RETRY_S = 1.0
#: Seconds to wait for a requested full frame, which normally arrives within a heartbeat. If it
#: doesn't, the replica took the request for an old one: the key's counter restarts when it expires.
PATIENCE_S = 3.0
#: Blocks of a full frame that are processed before other tasks of the event loop run.
SLICE = 1000

#: Called with the mirror, the changed blocks (None: all may have changed), and the evicted count.
Listener = Callable[[Mirror, set[int] | None, int], None]


class Watch:
    """Receives a replica's frames for its listeners."""

    def __init__(self, replica_id: str) -> None:
        prefix = settings.QUIRE.key_prefix
        self._key = watch_key(replica_id, prefix)
        self._channel = frames_key(replica_id, prefix)
        self.mirror = Mirror()
        self.listeners: set[Listener] = set()
        self.task: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    async def run(self) -> None:
        """Read frames until cancelled; reconnect while Redis is unreachable."""
        while True:
            redis = async_client(settings.REDIS_URL)
            try:
                await self._follow(redis)
            except (RedisError, OSError) as error:
                logger.warning("The block map is cut off: %s", error)
                await asyncio.sleep(RETRY_S)
            finally:
                with contextlib.suppress(RedisError, OSError):
                    await redis.aclose()

    async def _follow(self, redis: Redis) -> None:
        pubsub = redis.pubsub(ignore_subscribe_messages=True)
        await pubsub.subscribe(self._channel)
        await self._ask(redis, again=True)
        renewed = asyncio.get_running_loop().time()
        while True:
            message = await pubsub.get_message(timeout=0.5)
            if message is not None and not await self._apply_frame(message["data"]):
                await self._ask(redis, again=True)
            now = asyncio.get_running_loop().time()
            if now - renewed >= RENEW_S:
                renewed = now
                await self._ask(redis, again=False)

    async def _ask(self, redis: Redis, *, again: bool) -> None:
        """Renew the subscription. `again`: request a full frame."""
        if again:
            self._asked_at = asyncio.get_running_loop().time()
        if again or not await redis.expire(self._key, WATCH_TTL_S):
            async with redis.pipeline(transaction=True) as pipe:
                pipe.incr(self._key)
                pipe.expire(self._key, WATCH_TTL_S)
                await pipe.execute()

    async def _apply_frame(self, data: bytes) -> bool:
        """Apply a frame; return False if a full frame must be requested."""
        try:
            frame: KVMapFrame = decode_frame(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.warning("A frame of the block map can't be read: %s", error)
            return True
        began = self.mirror.frame is not None
        changed = None
        if frame.whole:
            await self._begin(frame)
        elif (changed := self.mirror.apply_frame(frame)) is None:
            # Frames of a run that began before we subscribed: the full frame is on its way.
            waited = asyncio.get_running_loop().time() - self._asked_at
            return not began and waited < PATIENCE_S
        for listener in list(self.listeners):
            listener(self.mirror, changed, frame.evicted)
        return True

    async def _begin(self, frame: KVMapFrame) -> None:
        """Apply a full frame in slices; the mirror only changes at the end."""
        cells: Cells = {}
        for start in range(0, len(frame.blocks), SLICE):
            cells |= cells_of(frame, frame.blocks[start : start + SLICE])
            await asyncio.sleep(0)
        self.mirror.begin(frame, cells)


class BlockHub:
    """This process's watches, by event loop and replica."""

    def __init__(self) -> None:
        self._watches: dict[tuple[int, str], Watch] = {}

    def join(self, replica_id: str, listener: Listener) -> Mirror:
        """Subscribe to a replica's blocks; return the current mirror."""
        loop = asyncio.get_running_loop()
        name = (id(loop), replica_id)
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = Watch(replica_id)
            watch.task = loop.create_task(keep_running("block map", watch.run))
        watch.listeners.add(listener)
        return watch.mirror

    def leave(self, replica_id: str, listener: Listener) -> None:
        """Unsubscribe. The watch ends with its last listener."""
        name = (id(asyncio.get_running_loop()), replica_id)
        watch = self._watches.get(name)
        if watch is None:
            return
        watch.listeners.discard(listener)
        if not watch.listeners:
            del self._watches[name]
            if watch.task is not None:
                watch.task.cancel()


hub = BlockHub()
