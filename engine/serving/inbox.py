"""Reads a replica's inbox stream in a separate thread."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.message_version import (
    UnreadableRequest,
    decode_unreadable_request,
    is_compatible,
)
from engine.contract.messages import (
    AbortRequest,
    EngineRequest,
    FollowPrefill,
    InboxMessage,
    gc_untracked,
)
from engine.system.host import request_short_time_slice
from engine.system.redis_client import is_temporary

# Only one process at a time serves under a replica id. A process that was suspended (stopped,
# swapped out, cut off from Redis) and replaced doesn't know that when it resumes. So a replica's
# first heartbeat stores its incarnation, and all its writes go through scripts that check it.


#: Start of a script: returns 0 unless KEYS[1], the owner, is unset or equals ARGV[1].
WRITE_IF_CURRENT = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
"""
#: After being suspended for this long, the process may have been replaced.
_DOUBT_AFTER_S = 1.0


class IncarnationReplaced(Exception):
    """Another process now serves under this replica id."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(f"Another process serves as {replica_id} by now; this one ends.")


class IncarnationFence:
    """Checks, for one thread, that this process still owns the replica id.

    Args:
        incarnation: this process's.
    """

    def __init__(self, client: redis.Redis, prefix: str, replica_id: str, incarnation: str) -> None:
        self._redis, self._replica_id, self._incarnation = client, replica_id, incarnation
        self.key = redis_keys.owner_key(replica_id, prefix)
        self._looked_at = time.monotonic()

    def check(self) -> None:
        """Before reading from Redis: check the owner of the id if this thread was suspended.

        Raises: `IncarnationReplaced`; redis.RedisError, after which the next call checks again.
        """
        now = time.monotonic()
        if now - self._looked_at > _DOUBT_AFTER_S:
            owner = self._redis.get(self.key)
            if owner is not None and owner != self._incarnation.encode():
                raise IncarnationReplaced(self._replica_id)
        self._looked_at = now


#: Id and content of an inbox entry.
ReceivedMessage = InboxMessage | UnreadableRequest
Entry = tuple[bytes, ReceivedMessage]


@dataclass(slots=True)
class _Epoch:
    """Messages that arrived between two commands of an operator, by tenant and priority.

    Attributes:
        end: the command that ends the epoch; None: it's still open.
    """

    lines: OrderedDict[str, dict[int, deque[Entry]]] = field(default_factory=OrderedDict)
    end: Entry | None = None

    def add(self, tenant: str, priority: int, entry: Entry) -> None:
        self.lines.setdefault(tenant, {}).setdefault(priority, deque()).append(entry)

    def pop(self) -> Entry:
        """Pop the next tenant's most urgent message; the tenant goes to the end of the rotation."""
        tenant, line = next(iter(self.lines.items()))
        priority = min(line)
        entry = line[priority].popleft()
        if not line[priority]:
            del line[priority]
        if line:
            self.lines.move_to_end(tenant)
        else:
            del self.lines[tenant]
        return entry


@dataclass(slots=True)
class _QueuedRequest:
    """Position of a waiting request. `count`: how often; it may have been sent twice."""

    round: _Epoch
    tenant: str
    priority: int
    count: int = 0


class TenantInbox:
    """Queue between the thread that puts messages and the one that takes them.

    Admitting hundreds of long prompts takes longer than many steps, and only a few waiting messages
    are taken between two steps. So the requests of tenants take turns, and within a tenant urgent
    ones come first. An abort comes after its request, or at once if that was taken already. An
    operator's command comes after all earlier messages and before all later ones.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._aborts: deque[Entry] = deque()
        self._rounds: deque[_Epoch] = deque([_Epoch()])
        self._queued_by_id: dict[str, _QueuedRequest] = {}

    def put(self, entry: Entry) -> None:
        """Queue a message."""
        message = entry[1]
        with self._changed:
            if (request := _request_of(message)) is not None:
                self._queue_request(request, entry)
            elif isinstance(message, AbortRequest):
                queued = self._queued_by_id.get(message.request_id)
                if queued is None:
                    self._aborts.append(entry)
                else:
                    queued.round.add(queued.tenant, queued.priority, entry)
            elif isinstance(message, UnreadableRequest):
                self._aborts.append(entry)  # its request isn't in the queue: nothing to wait for
            else:
                self._rounds[-1].end = entry
                self._rounds.append(_Epoch())
            self._changed.notify()

    def _queue_request(self, message: EngineRequest, entry: Entry) -> None:
        queued = self._queued_by_id.get(message.request_id)
        if queued is None:
            queued = _QueuedRequest(self._rounds[-1], message.tenant, message.priority)
            self._queued_by_id[message.request_id] = queued
        queued.count += 1
        queued.round.add(queued.tenant, queued.priority, entry)

    def get(self, timeout: float) -> Entry:
        """Pop the next message. Raises `queue.Empty` if none comes within `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(self._has_any, timeout):
                raise queue.Empty
            return self._pop()

    def get_nowait(self) -> Entry:
        """Pop the next message. Raises `queue.Empty` if there is none."""
        return self.get(0.0)

    def empty(self) -> bool:
        """Whether the queue is empty."""
        with self._changed:
            return not self._has_any()

    def _has_any(self) -> bool:
        first = self._rounds[0]
        return bool(self._aborts or first.lines or first.end)

    def _pop(self) -> Entry:
        if self._aborts:
            return self._aborts.popleft()
        first = self._rounds[0]
        if not first.lines and first.end is not None:
            self._rounds.popleft()
            return first.end
        entry = first.pop()
        if (request := _request_of(entry[1])) is not None:
            queued = self._queued_by_id[request.request_id]
            queued.count -= 1
            if not queued.count:
                del self._queued_by_id[request.request_id]
        return entry


def _request_of(message: ReceivedMessage) -> EngineRequest | None:
    """The request that a message has; None for other messages. Tenants also take turns with those
    that are followed, because their prompts are hashed.
    """
    if isinstance(message, FollowPrefill):
        return message.request
    return message if isinstance(message, EngineRequest) else None


log = logging.getLogger(__name__)

_BLOCK_MS = 500
_COUNT = 128
_RETRY_S = 0.5


class InboxReader(threading.Thread):
    """Consumer of the group `engine`; puts (entry id, message) into `messages`.

    An entry stays pending until `OutboxWriter` acknowledges it, after the request's last output.
    The stream belongs to the process that owns the replica id; a process that was replaced while it
    was suspended raises `IncarnationReplaced` before it takes any entries.
    If Redis's reply is lost with the connection, the entries in it are read again.
    Entries that a former incarnation left pending are dropped at startup: gateways notice the new
    incarnation and send unfinished requests again, with the tokens they already have.
    """

    def __init__(
        self, client: redis.Redis, stream: str, consumer: str, fence: IncarnationFence
    ) -> None:
        super().__init__(name="inbox", daemon=True)
        self.messages = TenantInbox()
        #: Time of the last successful read; infinite before the first and after `stop`.
        self.progress_at = math.inf
        self._redis = client
        self._stream = stream
        self._consumer = consumer
        self._fence = fence
        self._stopping = threading.Event()
        self._last_entry_id = b"0"
        self._has_lost_reply = False

    def stop(self) -> None:
        """Stop reading the stream."""
        self._stopping.set()

    def run(self) -> None:
        request_short_time_slice()
        is_first = True
        self.progress_at = time.time()
        while not self._stopping.is_set():
            try:
                self._fence.check()
                if is_first:
                    self._join_group()
                    self._discard_pending_entries()
                    is_first = False
                self._read()
                self.progress_at = time.time()
            except redis.RedisError as error:
                if "NOGROUP" in str(error):
                    # Redis restarted without our stream.
                    log.warning("The inbox's consumer group is gone; making it anew.")
                    is_first = True
                    self._last_entry_id = b"0"
                elif is_temporary(error):
                    log.warning("The inbox can't be read (%s); trying again.", error)
                    self._has_lost_reply = True
                    self._stopping.wait(_RETRY_S)
                else:
                    raise
        self.progress_at = math.inf

    def _join_group(self) -> None:
        try:
            self._redis.xgroup_create(self._stream, protocol.CONSUMER_GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _discard_pending_entries(self) -> None:
        """Delete entries that a previous incarnation had read and not finished."""
        dropped = 0
        while True:
            pending: Any = self._redis.xpending_range(
                self._stream, protocol.CONSUMER_GROUP, "-", "+", 1000
            )
            ids = [
                entry["message_id"] for entry in pending if entry["consumer"] != self._consumer_id
            ]
            if not ids:
                break
            self._redis.xack(self._stream, protocol.CONSUMER_GROUP, *ids)
            self._redis.xdel(self._stream, *ids)
            dropped += len(ids)
        if dropped:
            log.warning("Dropped %d inbox entries of a former incarnation.", dropped)

    @property
    def _consumer_id(self) -> bytes:
        return self._consumer.encode()

    def _read(self) -> None:
        # An explicit id returns entries delivered to this consumer before; ">" returns new ones.
        start: bytes | str = self._last_entry_id if self._has_lost_reply else ">"
        reply: Any = self._redis.xreadgroup(
            protocol.CONSUMER_GROUP,
            self._consumer,
            {self._stream: start},
            count=_COUNT,
            block=_BLOCK_MS,
        )
        entries = [entry for _, entries in reply or [] for entry in entries]
        for entry_id, fields in entries:
            self._decode_entries(entry_id, fields or {})
            self._last_entry_id = entry_id
        if not entries:
            self._has_lost_reply = False

    def _decode_entries(self, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        data = fields.get(protocol.STREAM_FIELD, b"")
        try:
            message = decode_message(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            # Its sender is unknown; if it stayed, it would be delivered again and again.
            log.error("Inbox entry %s isn't a message (%s); deleted.", entry_id.decode(), error)
            self._redis.xack(self._stream, protocol.CONSUMER_GROUP, entry_id)
            self._redis.xdel(self._stream, entry_id)
            return
        if isinstance(message, EngineRequest):
            gc_untracked(message.prompt_token_ids)
        self.messages.put((entry_id, message))


def decode_message(data: bytes) -> ReceivedMessage:
    """Decode a message; of a request that is invalid, decode what is needed to refuse it.

    Raises: msgspec.DecodeError, msgspec.ValidationError.
    """
    try:
        message = protocol.decode_inbox(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return decode_unreadable_request(data, str(error))
    if isinstance(message, EngineRequest) and not is_compatible(message.message_version):
        return decode_unreadable_request(data, "its version is too far away")
    return message
