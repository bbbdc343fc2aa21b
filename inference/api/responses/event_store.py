"""Events of a background response in Redis: its worker writes them, any gateway reads them."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from redis.exceptions import RedisError

from inference.api.responses.output_items import Event
from inference.engine_client.client import get_engine_client

_encode = msgspec.json.Encoder().encode

#: Seconds that events are stored after the last one, and after the end. Later, a stream consists of
#: only its last event, from the database.
KEEP_S, KEEP_ENDED_S = 3600, 600
#: Maximum number of events per read.
PAGE = 512
TERMINAL_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})


def encode_event(number: int, event: Event) -> bytes:
    """One server-sent event."""
    data = _encode({"type": event["type"], "sequence_number": number, **event})
    return b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n"


_ADD = """
if redis.call('get', KEYS[2]) ~= ARGV[1] then return 0 end
for i = 3, #ARGV, 3 do
  redis.call('xadd', KEYS[1], ARGV[i], 'kind', ARGV[i + 1], 'event', ARGV[i + 2])
end
redis.call('expire', KEYS[1], ARGV[2])
redis.call('expire', KEYS[2], ARGV[2])
return 1
"""


class LostLease(Exception):
    """Another writer has taken over these events."""


class ResponseEventStore:
    """The events of one response by their numbers, which are the entry ids of a Redis stream.

    There is one writer at a time: `acquire` excludes the previous writer, even one that doesn't
    know yet that it has lost the response.

    Args:
        writer: the writer's name; "" for reading only.
    """

    def __init__(self, public_id: str, writer: str = "") -> None:
        client = get_engine_client()
        self._redis = client.redis
        self._name = f"{client.settings.key_prefix}:response:{public_id}"
        self._writer, self._next = writer, 0

    async def acquire(self) -> list[Event]:
        """Return all stored events; from now on only this writer can add any."""
        await self._redis.set(f"{self._name}:writer", self._writer, ex=KEEP_S)
        events = [msgspec.json.decode(data) for _, _, data in await self.read_after(-1, None)]
        self._next = len(events)
        return events

    async def add(self, events: list[Event]) -> None:
        """Add events, all or none. Raises `LostLease`."""
        if not events:
            return
        keep_s = KEEP_ENDED_S if events[-1]["type"] in TERMINAL_EVENTS else KEEP_S
        entries: list[Any] = []
        for number, event in enumerate(events, start=self._next):
            entries += [f"{number + 1}-0", event["type"], _encode(event)]
        keys = (self._name, f"{self._name}:writer")
        added = await self._redis.eval(_ADD, 2, *keys, self._writer, keep_s, *entries)
        if not added:
            raise LostLease(self._name)
        self._next += len(events)

    async def read_after(
        self, number: int, count: int | None = PAGE
    ) -> list[tuple[int, str, bytes]]:
        """Number, type and JSON of the events after that number."""
        entries: Any = await self._redis.xrange(self._name, min=f"{number + 2}-0", count=count)
        return [
            (int(entry.partition(b"-")[0]) - 1, fields[b"kind"].decode(), fields[b"event"])
            for entry, fields in entries
        ]

    async def forget(self) -> None:
        with contextlib.suppress(RedisError):  # they expire
            await self._redis.delete(self._name, f"{self._name}:writer")
