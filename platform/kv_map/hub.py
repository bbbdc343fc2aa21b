"""Subscribes to replicas' block maps, once a process and replica, for all who look at them.

A replica tells of its blocks only while `watch_key` is there, and it's renewed only while somebody
looks.
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
#: A whole frame that was asked for comes within a heartbeat. Else the replica took the question for
#: an old one: the count begins anew when nobody looked for a while.
PATIENCE_S = 3.0
#: Blocks of a whole frame that are taken in before requests have their turn.
SLICE = 1000

#: Called with the mirror and what changed; None: everything may have.
Listener = Callable[[Mirror, set[int] | None, int], None]


class Watch:
    """A replica's frames, for its listeners."""

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
        """Go on looking. `again`: begin with a whole frame."""
        if again:
            self._asked_at = asyncio.get_running_loop().time()
        if again or not await redis.expire(self._key, WATCH_TTL_S):
            async with redis.pipeline(transaction=True) as pipe:
                pipe.incr(self._key)
                pipe.expire(self._key, WATCH_TTL_S)
                await pipe.execute()

    async def _apply_frame(self, data: bytes) -> bool:
        """False for a frame that doesn't follow the one before."""
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
            # Frames of a run that began before we looked: the whole one is on its way.
            waited = asyncio.get_running_loop().time() - self._asked_at
            return not began and waited < PATIENCE_S
        for listener in list(self.listeners):
            listener(self.mirror, changed, frame.evicted)
        return True

    async def _begin(self, frame: KVMapFrame) -> None:
        """All of a pool's blocks, a few at a time. Until then the mirror stays as it was."""
        cells: Cells = {}
        for start in range(0, len(frame.blocks), SLICE):
            cells |= cells_of(frame, frame.blocks[start : start + SLICE])
            await asyncio.sleep(0)
        self.mirror.begin(frame, cells)


class BlockHub:
    """This process's watches, of one event loop."""

    def __init__(self) -> None:
        self._watches: dict[tuple[int, str], Watch] = {}

    def join(self, replica_id: str, listener: Listener) -> Mirror:
        """Hear of a replica's blocks from now on; what is known of them already."""
        loop = asyncio.get_running_loop()
        name = (id(loop), replica_id)
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = Watch(replica_id)
            watch.task = loop.create_task(keep_running("block map", watch.run))
        watch.listeners.add(listener)
        return watch.mirror

    def leave(self, replica_id: str, listener: Listener) -> None:
        """Hear no more. The last one to leave ends the watch."""
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
