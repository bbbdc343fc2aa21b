"""Writing to replicas' inboxes: what is posted in one turn of the loop goes in one round trip."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine import protocol
from engine.protocol import AbortRequest

logger = logging.getLogger(__name__)

OnError = Callable[[RedisError], None]
CLOSE_TIMEOUT_S = 1.0


class InboxWriter:
    """Appends messages to inbox streams in the order they are posted, collected into pipelines."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis, self._prefix = redis, prefix
        self._queue: list[tuple[str, bytes, OnError]] = []
        self._flushing: asyncio.Task[None] | None = None

    def post(self, replica_id: str, message: msgspec.Struct, on_error: OnError) -> None:
        """Send soon. `on_error`: Redis failed, though it may have the message all the same."""
        key = protocol.inbox_key(replica_id, self._prefix)
        self._queue.append((key, protocol.encode(message), on_error))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush())

    def abort(self, replica_id: str, engine_id: str, index: int | None, reason: str) -> None:
        """Tell a replica to stop. When that fails the engine runs on to nobody."""

        def on_error(error: RedisError) -> None:
            logger.warning("The abort of %s could not be sent: %s", engine_id, error)

        message = AbortRequest(request_id=engine_id, index=index, finish_reason=reason)
        self.post(replica_id, message, on_error)

    async def _flush(self) -> None:
        while self._queue:
            batch, self._queue = self._queue, []
            pipeline = self._redis.pipeline(transaction=False)
            for key, data, _ in batch:
                pipeline.xadd(key, {protocol.FIELD: data})
            try:
                results = await pipeline.execute(raise_on_error=False)
            except RedisError as error:
                results = [error] * len(batch)
            for (_, _, on_error), result in zip(batch, results, strict=True):
                if isinstance(result, RedisError):
                    on_error(result)

    async def close(self) -> None:
        """Write what is queued, for at most `CLOSE_TIMEOUT_S`."""
        task = self._flushing
        if task is not None and not task.done():
            await asyncio.wait([task], timeout=CLOSE_TIMEOUT_S)
            task.cancel()
