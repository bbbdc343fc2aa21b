"""Writing to replicas' inboxes: what is posted in one turn of the loop goes in one write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from redis.exceptions import RedisError

from engine.contract import protocol
from engine.contract.protocol import AbortRequest
from engine.contract.redis_link import RedisLink

logger = logging.getLogger(__name__)

OnError = Callable[[RedisError], None]
CLOSE_TIMEOUT_S = 1.0


class InboxWriter:
    """Appends messages to inbox streams, in the order they are posted."""

    def __init__(self, link: RedisLink, prefix: str) -> None:
        self._link, self._prefix = link, prefix
        self._sent: set[asyncio.Future[Any]] = set()

    def post(self, replica_id: str, message: msgspec.Struct, on_error: OnError) -> None:
        """Send soon. `on_error`: Redis failed, though it may have the message all the same."""
        key = protocol.inbox_key(replica_id, self._prefix)
        reply = self._link.send("XADD", key, "*", protocol.FIELD, protocol.encode(message))
        self._sent.add(reply)
        reply.add_done_callback(lambda done: self._answered(done, on_error))

    def _answered(self, reply: asyncio.Future[Any], on_error: OnError) -> None:
        self._sent.discard(reply)
        error = None if reply.cancelled() else reply.exception()
        if isinstance(error, RedisError):
            on_error(error)

    def abort(self, replica_id: str, engine_id: str, index: int | None, reason: str) -> None:
        """Tell a replica to stop. When that fails the engine runs on to nobody."""

        def on_error(error: RedisError) -> None:
            logger.warning("The abort of %s could not be sent: %s", engine_id, error)

        message = AbortRequest(request_id=engine_id, index=index, finish_reason=reason)
        self.post(replica_id, message, on_error)

    async def close(self) -> None:
        """Wait until Redis has what was posted, for at most `CLOSE_TIMEOUT_S`."""
        if self._sent:
            await asyncio.wait(set(self._sent), timeout=CLOSE_TIMEOUT_S)
