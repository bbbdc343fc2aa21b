"""Hearing of replicas' beginnings and ends the moment they happen, instead of at the next look."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.contract import protocol
from engine.contract.protocol import ReplicaNews

logger = logging.getLogger(__name__)

RETRY_S = 0.5
WAIT_S = 4.0


class NewsReader:
    """Reads the channel of `ReplicaNews` for ever and gives each to `take`.

    What is missed while Redis is away is found by the looks at the heartbeats.
    """

    def __init__(
        self, redis: Redis, prefix: str, take: Callable[[ReplicaNews], Awaitable[None]]
    ) -> None:
        self._redis, self._take = redis, take
        self._channel = protocol.news_key(prefix)

    async def run(self) -> None:
        """Listen until cancelled. Redis may come and go."""
        while True:
            try:
                await self._listen()
            except RedisError as error:
                logger.debug("No news of replicas: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _listen(self) -> None:
        async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(self._channel)
            while True:
                message = await pubsub.get_message(timeout=WAIT_S)
                if message is not None:
                    await self._hand_out(message["data"])

    async def _hand_out(self, data: bytes) -> None:
        try:
            news = protocol.decode_news(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.warning("replica events unreadable: %s", error)
            return
        await self._take(news)
