"""Writing to replicas' inboxes: what is sent in one turn of the loop goes in one round trip."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine import protocol
from engine.protocol import AbortRequest

logger = logging.getLogger(__name__)

Waiting = tuple[str, bytes, "asyncio.Future[None]"]


class InboxWriter:
    """Appends messages to inbox streams, collected into pipelines."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis, self._prefix = redis, prefix
        self._queue: list[Waiting] = []
        self._flushing: asyncio.Task[None] | None = None

    async def send(self, replica_id: str, message: msgspec.Struct) -> None:
        """Return when Redis has it. Raises redis.RedisError; then it may or may not have it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        key = protocol.inbox_key(replica_id, self._prefix)
        self._queue.append((key, protocol.encode(message), done))
        if self._flushing is None or self._flushing.done():
            self._flushing = loop.create_task(self._flush())
        await done

    async def abort(self, replica_id: str, engine_id: str, index: int | None, reason: str) -> None:
        """Tell a replica to stop. A failure is logged: the engine then runs on to nobody."""
        message = AbortRequest(request_id=engine_id, index=index, finish_reason=reason)
        try:
            await self.send(replica_id, message)
        except RedisError as error:
            logger.warning("The abort of %s could not be sent: %s", engine_id, error)

    async def _flush(self) -> None:
        while self._queue:
            batch, self._queue = self._queue, []
            try:
                await self._write(batch)
            except asyncio.CancelledError:
                for _, _, done in batch + self._queue:
                    done.cancel()
                raise

    async def _write(self, batch: list[Waiting]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for key, data, _ in batch:
            pipeline.xadd(key, {protocol.FIELD: data})
        try:
            results = await pipeline.execute(raise_on_error=False)
        except RedisError as error:
            results = [error] * len(batch)
        for (_, _, done), result in zip(batch, results, strict=True):
            if done.done():
                continue
            if isinstance(result, Exception):
                done.set_exception(result)
            else:
                done.set_result(None)

    async def close(self) -> None:
        """Write what is queued, for at most a second."""
        if self._flushing is not None and not self._flushing.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._flushing), 1.0)
            self._flushing.cancel()
