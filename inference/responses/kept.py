"""A background response's events in Redis: its worker writes them, any gateway reads them."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from redis.exceptions import RedisError

from inference.engine_client import get_engine_client
from inference.responses.output import Event

#: Counted from the last event, and from the end: they are in memory. After that a stream is its end
#: alone, from the database.
KEEP_S, KEEP_ENDED_S = 3600, 600
#: Events that are read at a time.
PAGE = 512
ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})

_encode = msgspec.json.Encoder().encode


def encode_event(number: int, event: Event) -> bytes:
    """One server-sent event."""
    data = _encode({"type": event["type"], "sequence_number": number, **event})
    return b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n"


class KeptEvents:
    """The events of one response by their numbers, which are a Redis stream's entry ids.

    So no number is given twice: a worker that lost the response to another without knowing is
    refused by Redis (`ResponseError`).
    """

    def __init__(self, public_id: str) -> None:
        client = get_engine_client()
        self._redis = client.redis
        self._name = f"{client.settings.key_prefix}:response:{public_id}"
        self._next = 0

    async def load(self) -> list[Event]:
        """All that is there; what is added from now on comes behind it."""
        found = [msgspec.json.decode(data) for _, _, data in await self.after(-1, None)]
        self._next = len(found)
        return found

    async def add(self, events: list[Event]) -> None:
        """Add events, all or none."""
        if not events:
            return
        async with self._redis.pipeline(transaction=True) as commands:
            for number, event in enumerate(events, start=self._next):
                fields = {"kind": event["type"], "event": _encode(event)}
                commands.xadd(self._name, fields, id=f"{number + 1}-0")  # type: ignore[arg-type]
            ended = events[-1]["type"] in ENDS
            commands.expire(self._name, KEEP_ENDED_S if ended else KEEP_S)
            await commands.execute()
        self._next += len(events)

    async def after(self, number: int, count: int | None = PAGE) -> list[tuple[int, str, bytes]]:
        """Number, type and JSON of the events behind that one."""
        entries: Any = await self._redis.xrange(self._name, min=f"{number + 2}-0", count=count)
        return [
            (int(entry.partition(b"-")[0]) - 1, fields[b"kind"].decode(), fields[b"event"])
            for entry, fields in entries
        ]

    async def forget(self) -> None:
        """Remove them."""
        with contextlib.suppress(RedisError):  # they expire
            await self._redis.delete(self._name)
