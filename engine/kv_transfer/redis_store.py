"""`RedisStore`: KV blocks in Redis or Valkey."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from engine.contract.errors import ConfigError
from engine.kv_transfer.remote_tier import TIMEOUT_S, RemoteStore, StoreError
from engine.system.redis_client import replica_client

_PREFIX = b"quire:kv:"
_SECRET = _PREFIX + b"secret"
#: Sorted set of all records by their last use in Redis's own time; a member is the key and then
#: the record's length.
_INDEX = _PREFIX + b"index"
_USED_BYTES = _PREFIX + b"bytes"

_KEY_BYTES = 32
#: Records whose names are read at once to remove them.
_NUM_CLEARED = 1000

#: KEYS: index, used bytes, record. ARGV: member, record, capacity, prefix.
_SET = """
local used = tonumber(redis.call('GET', KEYS[2]) or '0')
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  used = used + #ARGV[2]
  while used > tonumber(ARGV[3]) do
    local oldest = redis.call('ZPOPMIN', KEYS[1])
    if #oldest == 0 then used = #ARGV[2]; break end
    redis.call('DEL', ARGV[4] .. string.sub(oldest[1], 1, 32))
    used = used - tonumber(string.sub(oldest[1], 33))
  end
end
local now = redis.call('TIME')
redis.call('SET', KEYS[3], ARGV[2])
redis.call('ZADD', KEYS[1], now[1] + now[2] / 1000000, ARGV[1])
redis.call('SET', KEYS[2], string.format('%.0f', used))
"""
#: KEYS: index, record. ARGV: member.
_GET = """
local now = redis.call('TIME')
redis.call('ZADD', KEYS[1], 'XX', now[1] + now[2] / 1000000, ARGV[1])
return redis.call('GET', KEYS[2])
"""
#: KEYS: index, used bytes, record. ARGV: member, the record's length.
_DELETE = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 then redis.call('DECRBY', KEYS[2], ARGV[2]) end
redis.call('DEL', KEYS[3])
"""


class RedisStore(RemoteStore):
    """Records in a Redis; the least recently used are evicted by each that is set.

    Its scripts keep the bytes within the capacity at every moment, whichever replica dies when.
    """

    def __init__(self, url: str, capacity: int, record_bytes: int) -> None:
        """Raises `ConfigError` for a URL that can't be one."""
        try:
            self._client = replica_client(url, timeout_s=TIMEOUT_S)
        except ValueError as error:
            raise ConfigError(
                f"kv_offloading_backend is no URL of a Redis: {error}",
                param="kv_offloading_backend",
            ) from error
        self._capacity, self._record_bytes = capacity, record_bytes
        register = self._client.register_script
        self._set, self._get, self._delete = register(_SET), register(_GET), register(_DELETE)

    def get(self, key: bytes) -> bytes | None:
        with _store_errors():
            record: bytes | None = self._get([_INDEX, _PREFIX + key], [self._member(key)])
            return record

    def contains(self, key: bytes) -> bool:
        with _store_errors():
            return bool(self._client.exists(_PREFIX + key))

    def set(self, key: bytes, record: bytes) -> None:
        with _store_errors():
            arguments: list[Any] = [self._member(key), record, self._capacity, _PREFIX]
            self._set([_INDEX, _USED_BYTES, _PREFIX + key], arguments)

    def delete(self, key: bytes) -> None:
        with _store_errors():
            arguments: list[Any] = [self._member(key), self._record_bytes]
            self._delete([_INDEX, _USED_BYTES, _PREFIX + key], arguments)

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        with _store_errors():
            for member, _ in self._client.zscan_iter(_INDEX):
                record: Any = self._client.get(_PREFIX + member[:_KEY_BYTES])
                if record is not None:  # evicted meanwhile
                    yield member[:_KEY_BYTES], record

    def clear(self) -> int:
        num_removed = 0
        with _store_errors():
            while True:
                members: list[Any] = self._client.zrange(_INDEX, 0, _NUM_CLEARED - 1)
                if not members:
                    break
                for member in members:
                    key, length = member[:_KEY_BYTES], member[_KEY_BYTES:]
                    self._delete([_INDEX, _USED_BYTES, _PREFIX + key], [member, length])
                num_removed += len(members)
        return num_removed

    def get_secret(self, new_secret: bytes) -> bytes:
        with _store_errors():
            self._client.set(_SECRET, new_secret, nx=True)
            secret: Any = self._client.get(_SECRET)
            return bytes(secret or b"")

    def read_used_bytes(self) -> int:
        with _store_errors():
            used: Any = self._client.get(_USED_BYTES)
            return int(used or 0)

    def close(self) -> None:
        self._client.close()

    def _member(self, key: bytes) -> bytes:
        return key + str(self._record_bytes).encode()


@contextmanager
def _store_errors() -> Iterator[None]:
    """Within it Redis's errors become `StoreError`."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error
