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

    Raises as `stream_before`.
    """
    about = await stream_before(caller)
    return None if about is None else about.read_until


async def stream_before(caller: Caller) -> OpenStream | None:
    """The stream that this request is to go on with; None where it begins one.

    Raises: `InvalidRequest` for a `Last-Event-ID` that is none of ours; `Overloaded` (503) without
    Redis.
    """
    position = asked_position()
    if position is None:
        return None
    client = get_engine_client()
    await client.start()
    try:
        return await open_stream(client, position.stream, caller)
    except RedisError as error:
        raise Overloaded("Streams can't be looked up right now. Try again.") from error


def holder_of(caller: Caller) -> str:
    """Who may go on with a stream within its tenant: who began it, be it with the next key.

    It's billed as the first key's, and its limits and budgets have reserved it.
    """
    if caller.key_id is None:
        return f"user {caller.user_id}"
    return f"key {caller.key_family or caller.key_id}"


async def open_stream(client: EngineClient, stream: str, caller: Caller) -> OpenStream | None:
    """What its gateway wrote down; None if it isn't there or isn't this caller's.

    Raises: RedisError.
    """
    name = protocol.stream_key(stream, client.settings.key_prefix)
    data: Any = await client.redis.hget(name, "open")  # type: ignore[misc]
    about = decode_open(data) if data is not None else None
    if about is None or about.tenant_id != caller.tenant_id:
        return None
    return about if about.holder == holder_of(caller) else None
