"""Clients of Redis, made in one place. What is asked by the thousand goes by `redis_link`."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio.connection as asynchronous
import redis.connection as synchronous
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.driver_info import DriverInfo
from redis.exceptions import ResponseError

from engine.contract.redis_link import is_left_behind

TIMEOUT_S = 5.0
#: Who asks, as `CLIENT SETINFO` says. Each connection would read it from redis-py's package anew: a
#: millisecond that an event loop stands still.
_DRIVER = DriverInfo()


class _Following:
    """Connects anew after the server was made a replica: the address may follow the primary."""

    _left_behind = False

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Raises what the connection's own does."""
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as error:
            self._left_behind |= is_left_behind(error)
            raise

    def send_packed_command(self, *args: Any, **options: Any) -> None:
        """Raises what the connection's own does."""
        if self._left_behind:
            self._left_behind = False
            self.disconnect()  # type: ignore[attr-defined]
        super().send_packed_command(*args, **options)  # type: ignore[misc]


class _AsyncFollowing:
    """The same for an event loop."""

    _left_behind = False

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Raises what the connection's own does."""
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as error:
            self._left_behind |= is_left_behind(error)
            raise

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        """Raises what the connection's own does."""
        if self._left_behind:
            self._left_behind = False
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
        await super().send_packed_command(*args, **options)  # type: ignore[misc]


class _Tcp(_Following, synchronous.Connection):
    pass


class _Tls(_Following, synchronous.SSLConnection):
    pass


class _Unix(_Following, synchronous.UnixDomainSocketConnection):
    pass


class _AsyncTcp(_AsyncFollowing, asynchronous.Connection):
    pass


class _AsyncTls(_AsyncFollowing, asynchronous.SSLConnection):
    pass


class _AsyncUnix(_AsyncFollowing, asynchronous.UnixDomainSocketConnection):
    pass


_KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "rediss": (_Tls, _AsyncTls),
    "unix": (_Unix, _AsyncUnix),
}


def _kinds(url: str) -> tuple[type[Any], type[Any]]:
    return _KINDS.get(urlsplit(url).scheme, (_Tcp, _AsyncTcp))


class FollowingPool(redis.ConnectionPool):
    """For others who make pools of connections, such as Django's cache."""

    @classmethod
    def from_url(cls, url: str, **options: Any) -> FollowingPool:
        """As redis-py's."""
        kind = _kinds(url)[0]
        return super().from_url(url, connection_class=kind, driver_info=_DRIVER, **options)


def sync_client(url: str, *, timeout_s: float = TIMEOUT_S, block_s: float = 0.0) -> redis.Redis:
    """A client for threads. `block_s`: its longest blocking read, on top of a reply's time."""
    return redis.Redis.from_url(
        url,
        connection_class=_kinds(url)[0],
        driver_info=_DRIVER,
        socket_timeout=timeout_s + block_s,
        socket_connect_timeout=timeout_s,
    )


def patient_client(url: str) -> redis.Redis:
    """A client for a replica's threads, whose blocking reads may take as long as they like."""
    kind = _kinds(url)[0]
    return redis.Redis.from_url(
        url, connection_class=kind, driver_info=_DRIVER, health_check_interval=15
    )


def async_client(url: str) -> AsyncRedis:
    """A client for what is asked a few times a second. It repeats no command by itself."""
    about: dict[str, Any] = dict(asynchronous.parse_url(url))
    about |= {"retry": Retry(NoBackoff(), 0), "connection_class": _kinds(url)[1]}
    about |= {"driver_info": _DRIVER}
    pool = asynchronous.ConnectionPool(
        **about, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
    )
    return AsyncRedis.from_pool(pool)
