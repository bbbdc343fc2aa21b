"""Operators' commands to replicas, and the replies."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from engine.contract.errors import EngineUnavailable
from engine.contract.messages import ControlReply, ControlRequest

if TYPE_CHECKING:
    from inference.engine_client.client import EngineClient


class ReplicaCommands:
    """Sends commands and waits for their replies."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[ControlReply]] = {}

    def on_reply(self, reply: ControlReply) -> None:
        """Resolve the command that this replies to; drop a reply that nobody waits for."""
        waiting = self._waiting.pop(reply.control_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    async def send_and_wait(
        self,
        client: EngineClient,
        replica_id: str,
        command: str,
        timeout_s: float,
        *,
        level: int = 1,
        tags: Sequence[str] = (),
        mode: str = "abort",
        request_ids: Sequence[str] = (),
        running: bool = False,
    ) -> ControlReply:
        """Send a command and return its reply. Raises `EngineUnavailable` after a timeout.

        The other arguments are those of `ControlRequest`.
        """
        control_id = uuid.uuid4().hex
        answer: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._waiting[control_id] = answer

        def on_error(error: RedisError) -> None:
            if not answer.done():
                answer.set_exception(EngineUnavailable(f"Redis did not take it: {error}"))

        message = ControlRequest(
            command=command,
            control_id=control_id,
            gateway_id=client.gateway_id,
            level=level,
            tags=list(tags),
            mode=mode,
            request_ids=list(request_ids),
            running=running,
        )
        client.post(replica_id, message, on_error)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise EngineUnavailable(f"No answer within {timeout_s:g} s.") from None
        finally:
            self._waiting.pop(control_id, None)
