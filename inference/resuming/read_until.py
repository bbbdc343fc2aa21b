"""How much of a stored conversation a stream has read: it grows while the stream is open.

Whoever goes on with the stream reads no more than that, or the prompt would be another one.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from redis.exceptions import RedisError

from engine.contract import protocol
from inference.engine_client import EngineClient, get_engine_client
from inference.engine_client.journal import OpenStream, decode_open
from inference.errors import Overloaded
from inference.resuming.position import asked_position
from tenants.authentication import Caller

#: Of the request at hand: the last item that was read, 0 of an empty conversation.
_read: ContextVar[int | None] = ContextVar("read_until", default=None)


def note_read(item: int | None) -> None:
    """Its prompt is made of the conversation's items up to this one; None: of no conversation."""
    _read.set(item)


def read_until() -> int | None:
    """What `note_read` was told, in this request's task."""
    return _read.get()


async def read_before(caller: Caller) -> int | None:
    """Up to where the stream that is to be gone on with has read; None where nothing says so.

    Raises: `InvalidRequest` for a `Last-Event-ID` that is none of ours; `Overloaded` (503) without
    Redis.
    """
    position = asked_position()
    if position is None:
        return None
    client = get_engine_client()
    await client.start()
    try:
        about = await open_stream(client, position.stream, caller.tenant_id)
    except RedisError as error:
        raise Overloaded("Streams can't be looked up right now. Try again.") from error
    return None if about is None else about.read_until


async def open_stream(client: EngineClient, stream: str, tenant_id: int) -> OpenStream | None:
    """What its first gateway wrote down; None if it isn't there or isn't this tenant's.

    Raises: RedisError.
    """
    name = protocol.stream_key(stream, client.settings.key_prefix)
    data: Any = await client.redis.hget(name, "open")  # type: ignore[misc]
    about = decode_open(data) if data is not None else None
    return about if about is not None and about.tenant_id == tenant_id else None
