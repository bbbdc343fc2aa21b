"""`Idempotency-Key`: a repeated request gets the stored response, and runs only once.

A key belongs to its tenant for a day. Only complete, successful responses are stored; after an
error the key is released, because the same request may succeed next time. Storage per tenant is
bounded: the oldest responses are evicted for new ones, which releases their keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from django.conf import settings
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.errors import Conflict
from engine.contract.errors import InvalidRequest
from inference.engine_client.client import get_engine_client
from inference.errors import Overloaded
from inference.request.context import PendingIdempotentResponse
from inference.web.responses import EventStreamResponse, resource_closers
from metering.access import ANSWERED_S, response_stored_key
from metering.redis_scripts import redis_key, sync_client

logger = logging.getLogger(__name__)

_KEY = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,254}")
RESPONSE_TTL_S = 24 * 3600
#: Seconds after which the keys of a crashed gateway are released, so that clients may retry.
LOCK_TTL_S = 12
#: Larger responses are not stored, so that they don't fill Redis; their keys are released.
MAX_BYTES = 1 << 18
#: Start of a script that changes a key only while we hold it: the lock may have expired meanwhile.
CLAIM_SCRIPT = "if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end "
_RELEASE = CLAIM_SCRIPT + "return redis.call('del', KEYS[1])"
_EXTEND = CLAIM_SCRIPT + "return redis.call('expire', KEYS[1], ARGV[2])"
#: Bytes that Redis needs per entry besides its content: names, an expiry, a line in the index.
ENTRY_OVERHEAD_BYTES = 400
#: KEYS: the entry, the tenant's index (`digest size`, scored by time stored), the index's sum.
#: ARGV: the expected entry, TTL in seconds, the new entry, its digest, its size, the tenant's
#: maximum bytes, the prefix of entry names, TTL of the marks. Further KEYS: marks to set, one per
#: request whose response is stored.
_STORE = (
    CLAIM_SCRIPT
    + """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local sum = tonumber(redis.call('get', KEYS[3]) or 0)
local size, most = tonumber(ARGV[5]), tonumber(ARGV[6])
local function drop(line)
  redis.call('zrem', KEYS[2], line)
  sum = sum - tonumber(string.match(line, ' (%d+)$'))
end
for _, line in ipairs(redis.call('zrangebyscore', KEYS[2], '-inf', now - ARGV[2])) do drop(line) end
if size > most then return redis.call('del', KEYS[1]) end
while sum + size > most do
  local line = redis.call('zrange', KEYS[2], 0, 0)[1]
  if not line then break end
  redis.call('del', ARGV[7] .. string.match(line, '^(%x+)'))
  drop(line)
end
redis.call('set', KEYS[1], ARGV[3], 'EX', ARGV[2])
redis.call('zadd', KEYS[2], now, ARGV[4] .. ' ' .. ARGV[5])
redis.call('expire', KEYS[2], ARGV[2])
redis.call('set', KEYS[3], math.max(0, sum) + size, 'EX', ARGV[2])
for i = 4, #KEYS do redis.call('set', KEYS[i], 1, 'EX', ARGV[8]) end
return 1
"""
)


class KeyReused(InvalidRequest):
    """The key was already used for a different request."""

    status = 422
    code = "idempotency_key_reused"


class InFlight(Conflict):
    """The first request with this key is still running."""

    code = "idempotency_key_in_use"
    retry_after = 1.0


class IdempotencyEntry(msgspec.Struct):
    """Entry of a key in Redis. `body` None: its request is still running."""

    fingerprint: bytes
    token: bytes
    content_type: str = ""
    body: bytes | None = None


def fingerprint(method: str, path: str, body: bytes) -> bytes:
    """Digest that is equal for equal requests."""
    return hashlib.sha256(b"\0".join([method.encode(), path.encode(), body])).digest()


class IdempotencyKey:
    """One request's lock on its key."""

    def __init__(self, redis: Redis, prefix: str, digest: str, entry: IdempotencyEntry) -> None:
        self._redis, self._prefix, self._digest, self._entry = redis, prefix, digest, entry
        self._name = prefix + digest
        self._encoded_entry = msgspec.msgpack.encode(entry)
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, key: str, tenant_id: int, print_of_request: bytes) -> IdempotencyKey:
        """Raises `InvalidRequest` for an invalid key."""
        if not _KEY.fullmatch(key):
            raise InvalidRequest(
                "Idempotency-Key must be 1 to 255 printable ASCII characters.",
                param="Idempotency-Key",
            )
        client = get_engine_client()
        digest = hashlib.sha256(key.encode()).hexdigest()
        prefix = f"{client.settings.key_prefix}:idempotency:{tenant_id}:"
        return cls(
            client.redis,
            prefix,
            digest,
            IdempotencyEntry(print_of_request, secrets.token_bytes(16)),
        )

    async def run(
        self, handle: Callable[[PendingIdempotentResponse], Awaitable[HttpResponseBase]]
    ) -> HttpResponseBase:
        """The response of `handle`, or the one that was stored.

        Raises: `KeyReused` (422), `InFlight` (409), `Overloaded` (503) without Redis, and what
        `handle` raises.
        """
        try:
            stored = await self._acquire()
        except RedisError as error:
            raise Overloaded("Idempotency keys can't be looked up right now.") from error
        if stored is not None:
            return stored
        self._keeper = asyncio.create_task(self._extend_lock())
        pending = PendingIdempotentResponse()
        try:
            response = await handle(pending)
            if isinstance(response, EventStreamResponse):
                return self._tee_stream(response)
            if isinstance(response, HttpResponse) and response.status_code == 200:
                names = map(response_stored_key, pending.requests)
                await self._save(response["Content-Type"], response.content, names)
            else:
                await self._release()
        except BaseException:
            await self._release()
            raise
        finally:
            pending.done.set()
        return response

    async def _acquire(self) -> HttpResponseBase | None:
        """Lock the key, or return its stored response. Raises `KeyReused`, `InFlight`."""
        for _ in range(3):
            if await self._redis.set(self._name, self._encoded_entry, nx=True, ex=LOCK_TTL_S):
                return None
            data: bytes | None = await self._redis.get(self._name)  # type: ignore[assignment]
            if data is None:  # it was released just now
                continue
            entry = msgspec.msgpack.decode(data, type=IdempotencyEntry)
            if entry.fingerprint != self._entry.fingerprint:
                raise KeyReused(
                    "This Idempotency-Key was used for another request.", param="Idempotency-Key"
                )
            if entry.body is not None:
                return _replay(entry)
            break
        raise InFlight(
            "A request with this Idempotency-Key is still running.", param="Idempotency-Key"
        )

    async def _extend_lock(self) -> None:
        while True:
            await asyncio.sleep(LOCK_TTL_S / 3)
            with contextlib.suppress(RedisError):  # the next iteration retries before it expires
                await self._run_if_locked(_EXTEND, LOCK_TTL_S)

    async def _save(self, content_type: str, body: bytes, marks: Iterable[str] = ()) -> None:
        if len(body) > MAX_BYTES:
            await self._release()
            return
        self._entry.content_type, self._entry.body = content_type, body
        data = msgspec.msgpack.encode(self._entry)
        self._stop_extending()
        size = len(data) + ENTRY_OVERHEAD_BYTES
        max_bytes = settings.QUIRE.tenant_quotas.idempotency_bytes
        names = [self._name, f"{self._prefix}index", f"{self._prefix}sum", *marks]
        values: list[Any] = [
            self._encoded_entry,
            RESPONSE_TTL_S,
            data,
            self._digest,
            size,
            max_bytes,
            self._prefix,
        ]
        values.append(ANSWERED_S)
        with contextlib.suppress(RedisError):  # the client has its response; the lock expires
            await self._redis.eval(_STORE, len(names), *names, *values)

    async def _release(self) -> None:
        self._stop_extending()
        with contextlib.suppress(RedisError):  # the lock expires
            await self._run_if_locked(_RELEASE)

    async def _run_if_locked(self, script: str, *more: int | bytes) -> None:
        await self._redis.eval(script, 1, self._name, self._encoded_entry, *more)

    def _stop_extending(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()

    def _tee_stream(self, response: EventStreamResponse) -> EventStreamResponse:
        """Pass a stream on, and store it once it has ended without an error."""
        recorded = EventStreamResponse(self._record(response), self._stop_extending)
        recorded.headers = response.headers
        resource_closers(recorded).extend(resource_closers(response))
        return recorded

    async def _record(self, response: EventStreamResponse) -> AsyncGenerator[bytes, None]:
        chunks: list[bytes] = []
        size, failed, is_complete = 0, False, False
        try:
            async with aclosing(response.events) as events:
                async for chunk in events:
                    size += len(chunk)
                    failed |= b"event: error\n" in chunk or b"event: response.failed\n" in chunk
                    if size <= MAX_BYTES:
                        chunks.append(chunk)
                    yield bytes(chunk)  # never a `LastChunk`: the stream ends once it is stored
            is_complete = True
        finally:
            if is_complete and not failed and size <= MAX_BYTES:
                await self._save(response["Content-Type"], b"".join(chunks))
            else:
                await asyncio.shield(self._release())


def _replay(entry: IdempotencyEntry) -> HttpResponseBase:
    body = entry.body or b""
    response = HttpResponse(body, content_type=entry.content_type)
    response["Content-Length"] = str(len(body))
    response["Idempotent-Replayed"] = "true"
    return response


class TenantRef(Protocol):
    """The tenant's row."""

    pk: int


def delete_idempotent_responses(tenant: TenantRef) -> int:
    """Delete the stored responses of a tenant's keys, and return their number.

    Without Redis it deletes none; they expire within a day.
    """
    client = sync_client()
    try:
        names = list(client.scan_iter(match=redis_key(f"idempotency:{tenant.pk}:*"), count=1000))
        return sum(int(client.unlink(name)) for name in names)
    except (RedisError, OSError) as error:
        logger.warning("answers of %s stay in Redis for a day: %s", tenant, error)
        return 0
    finally:
        client.close()
