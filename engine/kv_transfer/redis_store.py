"""`RedisStore`: KV blocks in Redis or Valkey."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import redis

from engine.contract.errors import ConfigError
from engine.kv_transfer.remote_tier import TIMEOUT_S, RemoteStore, StoreError
from engine.kv_transfer.storage_tier import HEADER, OWNER_BYTES
from engine.system.redis_client import replica_client

_PREFIX = b"quire:kv:"
_SECRET = _PREFIX + b"secret"
#: Sorted set of a tenant's records by their last use in Redis's own time, with its tag after it; a
#: member is the key and then the record's length.
_INDEX = _PREFIX + b"index:"
#: Sorted set of the tenants' tags by their bytes.
_OWNERS = _PREFIX + b"owners"
_USED_BYTES = _PREFIX + b"bytes"

_KEY_BYTES = 32
#: A tenant's tag ends a record's header.
_OWNER = slice(HEADER.size - OWNER_BYTES, HEADER.size)
#: Last of the records whose names are read at once to remove them.
_NUM_CLEARED = 999

#: KEYS: index, used bytes, record, owners. ARGV: member, record, capacity, prefix,
#: owner, prefix of indices.
_SET = """
local used = tonumber(redis.call('GET', KEYS[2]) or '0')
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  used = used + #ARGV[2]
  redis.call('ZINCRBY', KEYS[4], #ARGV[2], ARGV[5])
  while used > tonumber(ARGV[3]) do
    local largest = redis.call('ZREVRANGE', KEYS[4], 0, 1)
    local owner = largest[1]
    if owner == ARGV[5] and redis.call('EXISTS', KEYS[1]) == 0 then owner = largest[2] end
    if not owner then used = #ARGV[2]; break end
    local oldest = redis.call('ZPOPMIN', ARGV[6] .. owner)
    if #oldest == 0 then
      redis.call('ZREM', KEYS[4], owner)
    else
      redis.call('ZINCRBY', KEYS[4], -string.sub(oldest[1], 33), owner)
      redis.call('DEL', ARGV[4] .. string.sub(oldest[1], 1, 32))
      used = used - tonumber(string.sub(oldest[1], 33))
    end
  end
end
local now = redis.call('TIME')
redis.call('SET', KEYS[3], ARGV[2])
redis.call('ZADD', KEYS[1], now[1] + now[2] / 1000000, ARGV[1])
redis.call('SET', KEYS[2], string.format('%.0f', used))
"""
#: KEYS: prefix of indices, record. ARGV: member, first and last byte of the owner.
_GET = """
local record = redis.call('GET', KEYS[2])
if record then
  local now = redis.call('TIME')
  local index = KEYS[1] .. string.sub(record, ARGV[2], ARGV[3])
  redis.call('ZADD', index, 'XX', now[1] + now[2] / 1000000, ARGV[1])
end
return record
"""
#: KEYS: index, used bytes, record, owners. ARGV: member, the record's length, owner.
_DELETE = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 then
  redis.call('DECRBY', KEYS[2], ARGV[2])
  redis.call('ZINCRBY', KEYS[4], -ARGV[2], ARGV[3])
end
redis.call('DEL', KEYS[3])
"""


class RedisStore(RemoteStore):
    """Records in a Redis; each that is set evicts the least recently used ones of the tenant with
    the most bytes, so that none can push out what others have within an equal share.

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

    def get(self, key: bytes, owner: bytes) -> bytes | None:
        with _store_errors():
            arguments: list[Any] = [self._member(key), _OWNER.start + 1, _OWNER.stop]
            record: bytes | None = self._get([_INDEX, _PREFIX + key], arguments)
            return record

    def contains(self, key: bytes, owner: bytes) -> bool:
        with _store_errors():
            return bool(self._client.exists(_PREFIX + key))

    def set(self, key: bytes, owner: bytes, record: bytes) -> None:
        with _store_errors():
            arguments: list[Any] = [self._member(key), record, self._capacity, _PREFIX, owner]
            keys = [_INDEX + owner, _USED_BYTES, _PREFIX + key, _OWNERS]
            self._set(keys, [*arguments, _INDEX])

    def delete(self, key: bytes, owner: bytes) -> None:
        with _store_errors():
            name = _PREFIX + key
            arguments: list[Any] = [self._member(key), self._record_bytes, owner]
            self._delete([_INDEX + owner, _USED_BYTES, name, _OWNERS], arguments)

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        with _store_errors():
            for owner in self._owners():
                for member, _ in self._client.zscan_iter(_INDEX + owner):
                    record: Any = self._client.get(_PREFIX + member[:_KEY_BYTES])
                    if record is not None:  # evicted meanwhile
                        yield member[:_KEY_BYTES], record

    def clear(self) -> int:
        num_removed = 0
        with _store_errors():
            for owner in self._owners():
                index = _INDEX + owner
                while members := cast("list[bytes]", self._client.zrange(index, 0, _NUM_CLEARED)):
                    for member in members:
                        name, length = _PREFIX + member[:_KEY_BYTES], member[_KEY_BYTES:]
                        self._delete([index, _USED_BYTES, name, _OWNERS], [member, length, owner])
                    num_removed += len(members)
        return num_removed

    def _owners(self) -> list[bytes]:
        """The tags of all tenants with records."""
        owners: Any = self._client.zrange(_OWNERS, 0, -1)
        return list(owners)

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
