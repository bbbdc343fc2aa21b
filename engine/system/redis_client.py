"""Redis clients; `RedisPipeline` is the one for thousands of commands per second."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import hiredis
import redis
import redis.asyncio.connection as asynchronous
import redis.connection as synchronous
import redis.retry
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.driver_info import DriverInfo
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

logger = logging.getLogger(__name__)

RedisArg = bytes | str | int | float
#: Called with a reply; must not raise.
OnReply = Callable[[Any], None]
CONNECT_TIMEOUT_S = 5.0
#: Maximum commands waiting for replies, so that a stalled Redis doesn't fill memory.
MAX_PENDING = 100_000


#: Errors of a reachable Redis that can't serve at present, which time or its operator resolves.
#: redis-py turns some of these codes into classes, and prefixes messages in a pipeline.
_REFUSAL = re.compile(
    r"(?:^|caused error: )"
    r"(OOM|READONLY|MISCONF|LOADING|MASTERDOWN|NOREPLICAS|CLUSTERDOWN|TRYAGAIN|UNBLOCKED)\b"
)
_REFUSALS: dict[type[RedisError], str] = {OutOfMemoryError: "OOM", ReadOnlyError: "READONLY"}


def error_code_of(error: RedisError) -> str | None:
    """Return the code of an error that means Redis can't serve at present ("OOM", "READONLY",
    "MISCONF" ...); None for any other error.
    """
    if word := _REFUSALS.get(type(error)):
        return word
    match = _REFUSAL.search(str(error)) if isinstance(error, ResponseError) else None
    return match[1] if match else None


def is_temporary(error: RedisError) -> bool:
    """Whether to retry later: Redis is unreachable, or reports that it can't serve now."""
    if isinstance(error, RedisConnectionError | RedisTimeoutError):
        return True
    return error_code_of(error) is not None


#: Errors of a server that is, or has just become, a replica.
_OF_REPLICAS = frozenset({"READONLY", "MASTERDOWN", "UNBLOCKED"})
#: A younger connection isn't replaced, so that a Redis that stays read-only isn't flooded.
_LEAVE_AFTER_S = 0.5


def is_demoted_primary(error: RedisError) -> bool:
    """Whether the server became a replica, so that its address may now lead to another server."""
    return error_code_of(error) in _OF_REPLICAS


class RedisPipeline:
    """Pipelined commands over one connection, opened when needed and again after it broke.

    A redis-py command holds a pooled connection until its reply arrives, and costs an event loop
    about 0.1 ms. Here all commands share a connection: commands of one loop iteration leave in one
    write, replies arrive in order, and a command costs a few microseconds. redis-py opens the
    connection (TLS, users, databases); hiredis encodes and parses the protocol.

    No command is sent twice: when the connection breaks, every command without a reply fails. A
    server that reports being a replica gets no more commands: later ones go to the server that
    then has its address.

    Args:
        url: redis://, rediss:// or unix://, as redis-py reads it.
        timeout_s: seconds without a reply after which the connection is closed.

    All methods are called on one event loop.
    """

    def __init__(self, url: str, *, timeout_s: float = 5.0) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._wire: _RedisProtocol | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._unsent: list[bytes] = []
        self._waiting: list[asyncio.Future[Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def send(self, *words: RedisArg, hear: OnReply | None = None) -> asyncio.Future[Any]:
        """Send a command in this loop iteration; the future gets its reply (RESP2, bytes).

        `hear` is called as soon as the reply arrives, whereas the awaiting task continues in the
        next loop iteration, which may be long.

        The future fails with `redis.RedisError`: `ResponseError` and `NoScriptError` come from
        Redis; after `ConnectionError` and `TimeoutError` it is unknown whether the command ran.
        """
        loop = self._loop = self._loop or asyncio.get_running_loop()
        future: asyncio.Future[Any]
        future = loop.create_future() if hear is None else _CallbackFuture(hear, loop=loop)
        wire = self._wire
        if len(self._waiting) + (len(wire.pending) if wire else 0) >= MAX_PENDING:
            future.set_exception(RedisConnectionError("Too many commands wait for Redis."))
            return future
        self._unsent.append(hiredis.pack_command(words))  # type: ignore[arg-type]
        self._waiting.append(future)
        if len(self._waiting) == 1:
            if wire is not None:
                loop.call_soon(self.flush)
            elif self._connecting is None:
                self._connecting = loop.create_task(self._connect())
        return future

    async def execute(self, *words: RedisArg) -> Any:
        """Send a command and wait for its reply. Raises redis.RedisError."""
        return await self.send(*words)

    async def close(self) -> None:
        """Close the connection. Commands without a reply fail."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._wire is not None:
            self.flush()
            self._wire.close()
        self._fail_unsent(RedisConnectionError("The connection to Redis was closed."))

    def flush(self) -> None:
        """Write queued commands now instead of at the end of this loop iteration."""
        wire = self._wire
        if wire is None:  # it broke: commands that weren't written go over the next one
            if self._waiting and self._connecting is None:
                self._connecting = asyncio.create_task(self._connect())
            return
        if self._waiting:
            wire.write(b"".join(self._unsent), self._waiting)
            self._unsent, self._waiting = [], []

    async def _connect(self) -> None:
        try:
            self._wire = await _open(self._url, self._timeout_s, self._broken)
        except (RedisError, OSError) as error:
            self._fail_unsent(_as_redis_error(error))
        finally:
            self._connecting = None
        self.flush()

    def _broken(self, wire: _RedisProtocol) -> None:
        if self._wire is wire:
            self._wire = None

    def _fail_unsent(self, error: RedisError) -> None:
        waiting, self._waiting, self._unsent = self._waiting, [], []
        _fail(waiting, error)


class _CallbackFuture(asyncio.Future[Any]):
    """A future that calls `hear` with its result immediately."""

    def __init__(self, hear: OnReply, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._hear = hear

    def set_result(self, result: Any) -> None:
        """Set the reply as the result."""
        super().set_result(result)
        self._hear(result)


class _RedisProtocol(asyncio.Protocol):
    """A socket after the handshake; replies are assigned to the futures in order."""

    def __init__(self, timeout_s: float, on_lost: Any) -> None:
        self._timeout_s, self._on_lost = timeout_s, on_lost
        self._reader = hiredis.Reader(replyError=_reply_error)
        self.pending: deque[asyncio.Future[Any]] = deque()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._answered = 0
        self._connected_at, self._is_lost = self._loop.time(), False
        self._error: RedisError | None = None

    def use(self, writer: asyncio.StreamWriter) -> None:
        """Take over a connected socket after its handshake."""
        transport: Any = writer.transport
        self._writer = writer  # kept: it closes the socket when it is garbage-collected
        self._transport = transport
        transport.set_protocol(self)

    def write(self, data: bytes, futures: Sequence[asyncio.Future[Any]]) -> None:
        """Write commands; each future gets its reply."""
        self.pending.extend(futures)
        if self._transport is None or self._transport.is_closing():
            self.connection_lost(None)
            return
        self._transport.write(data)
        if self._watch is None:
            self._schedule_check()

    def close(self) -> None:
        """Close the socket after writing what is queued."""
        if self._transport is not None:
            self._transport.close()
        self._stop_watching()

    def data_received(self, data: bytes) -> None:
        reader, pending = self._reader, self.pending
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                self._answered += 1
                future = pending.popleft()
                if isinstance(reply, RedisError) and is_demoted_primary(reply):
                    self._leave()
                if future.done():  # cancelled
                    continue
                if isinstance(reply, RedisError):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (hiredis.ProtocolError, IndexError) as error:
            self._abort(RedisConnectionError(f"Redis sent what is no reply: {error!r}"))
        if self._is_lost and not pending:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_watching()
        self._on_lost(self)
        reason = self._error or RedisConnectionError(f"Redis closed the connection: {error}")
        futures = list(self.pending)
        self.pending.clear()
        _fail(futures, reason)

    def _leave(self) -> None:
        """Accept no more commands; the pipeline reconnects for the next one."""
        if not self._is_lost and self._loop.time() - self._connected_at > _LEAVE_AFTER_S:
            self._is_lost = True
            self._on_lost(self)

    def _schedule_check(self) -> None:
        self._watch = self._loop.call_later(self._timeout_s, self._check_replies, self._answered)

    def _check_replies(self, answered: int) -> None:
        """Close after between one and two `timeout_s` without an expected reply."""
        self._watch = None
        if not self.pending:
            return
        if self._answered == answered:
            self._abort(RedisTimeoutError(f"Redis did not answer within {self._timeout_s:g} s."))
            return
        self._schedule_check()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _abort(self, error: RedisError) -> None:
        self._error = error
        if self._transport is not None:
            self._transport.abort()


async def _open(url: str, timeout_s: float, on_lost: Any) -> _RedisProtocol:
    """Connect and do the handshake. Raises redis.RedisError, OSError."""
    arguments: dict[str, Any] = dict(parse_url(url))
    kind: type[AbstractConnection] = arguments.pop("connection_class", Connection)
    arguments |= {
        "protocol": 2,  # RESP3 may push messages that don't belong to a command
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
    }
    connection = kind(**arguments)
    await connection.connect()
    writer = connection._writer
    if writer is None:
        raise RedisConnectionError("The connection to Redis closed while it was made.")
    connection._reader = connection._writer = None  # detached from redis-py's connection
    wire = _RedisProtocol(timeout_s, on_lost)
    wire.use(writer)
    return wire


def _reply_error(text: str) -> RedisError:
    return NoScriptError(text) if text.startswith("NOSCRIPT") else ResponseError(text)


def _as_redis_error(error: RedisError | OSError) -> RedisError:
    return error if isinstance(error, RedisError) else RedisConnectionError(str(error))


def _fail(futures: Sequence[asyncio.Future[Any]], error: RedisError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
            future.exception()  # retrieved: nothing may be awaiting a posted command


TIMEOUT_S = 5.0
#: A connection that ends silently is replaced within 5 s, including the pause before.
REPLICA_TIMEOUT_S = 4.0
#: The library name for `CLIENT SETINFO`. redis-py would read it from its package's metadata for
#: each connection, which blocks the event loop for a millisecond.
_DRIVER = DriverInfo()


class _FailoverConnection:
    """Reconnects after the server became a replica: its address may lead to the new primary."""

    _is_demoted = False

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Raises what the connection's own does."""
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as error:
            self._is_demoted |= is_demoted_primary(error)
            raise

    def send_packed_command(self, *args: Any, **options: Any) -> None:
        """Raises what the connection's own does."""
        if self._is_demoted:
            self._is_demoted = False
            self.disconnect()  # type: ignore[attr-defined]
        super().send_packed_command(*args, **options)  # type: ignore[misc]


class _AsyncFollowing:
    """The same for an event loop."""

    _is_demoted = False

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Raises what the connection's own does."""
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as error:
            self._is_demoted |= is_demoted_primary(error)
            raise

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        """Raises what the connection's own does."""
        if self._is_demoted:
            self._is_demoted = False
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
        await super().send_packed_command(*args, **options)  # type: ignore[misc]


def _kind(following: type, connection: type) -> type[Any]:
    """Return a kind of connection that follows a primary."""
    return type(connection.__name__, (following, connection), {})


#: By scheme, connections for threads and for event loops.
_KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    scheme: (
        _kind(_FailoverConnection, getattr(synchronous, name)),
        _kind(_AsyncFollowing, getattr(asynchronous, name)),
    )
    for scheme, name in (
        ("redis", "Connection"),
        ("rediss", "SSLConnection"),
        ("unix", "UnixDomainSocketConnection"),
    )
}


def _kinds(url: str) -> tuple[type[Any], type[Any]]:
    return _KINDS.get(urlsplit(url).scheme, _KINDS["redis"])


class FailoverConnectionPool(redis.ConnectionPool):
    """A connection pool for libraries that create their own, such as Django's cache."""

    @classmethod
    def from_url(cls, url: str, **options: Any) -> FailoverConnectionPool:
        """Create a pool as redis-py does."""
        kind = _kinds(url)[0]
        return super().from_url(url, connection_class=kind, driver_info=_DRIVER, **options)


def sync_client(
    url: str, *, timeout_s: float = TIMEOUT_S, block_s: float = 0.0, **options: Any
) -> redis.Redis:
    """Return a client for threads. `block_s` is its longest blocking read in seconds, in addition
    to a reply's timeout; `options` are redis-py's.
    """
    return redis.Redis.from_url(  # noqa: TID251
        url,
        connection_class=_kinds(url)[0],
        driver_info=_DRIVER,
        socket_timeout=timeout_s + block_s,
        socket_connect_timeout=timeout_s,
        **options,
    )


def replica_client(url: str, *, timeout_s: float = REPLICA_TIMEOUT_S) -> redis.Redis:
    """Return a client for a replica's threads, whose blocking reads take less than `timeout_s`.

    It doesn't retry commands: a lost reply may have contained inbox entries, which a repeated
    command wouldn't return.
    """
    return sync_client(url, timeout_s=timeout_s, retry=redis.retry.Retry(NoBackoff(), 0))


def async_client(url: str) -> AsyncRedis:
    """Return a client for a few commands per second. It doesn't retry commands."""
    about: dict[str, Any] = dict(asynchronous.parse_url(url))
    about |= {"retry": Retry(NoBackoff(), 0), "connection_class": _kinds(url)[1]}
    about |= {"driver_info": _DRIVER}
    pool = asynchronous.ConnectionPool(
        **about, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
    )
    return AsyncRedis.from_pool(pool)
